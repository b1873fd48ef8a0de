// Compute the arithmetic of YOLO heads: sigmoid, YOLOv5's decode, the anchor-free (DFL) decode, and letterboxed boxes
// back in original pixels. The arithmetic type A is float, or double for double; the caller rounds to the storage type.
#pragma once

#include "core/common/exact_math.h"

#if defined(__CUDA_ARCH__)
#define TORCH_FASTDET_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)
#define TORCH_FASTDET_UNROLL  // nvcc's host pass supports neither pragma
#else
#define TORCH_FASTDET_UNROLL _Pragma("GCC unroll 16")
#endif

namespace torch_fastdet::core {

template <typename A>
struct CenterBox {
  A x, y, width, height;
};

template <typename A>
struct alignas(16) CornerBox {
  A x1, y1, x2, y2;
};

template <typename A>
TORCH_FASTDET_HOST_DEVICE A sigmoid(A x) {
  return reciprocal_rn(add_rn(A(1), exp_rn(-x)));
}

// Return the pixels of a box center, (2 s - 0.5 + cell) * stride, where s is the sigmoid of its logit.
template <typename A>
TORCH_FASTDET_HOST_DEVICE A center_of(A s, int64_t cell, A stride) {
  return mul_rn(add_rn(mul_rn(s, A(2)), sub_rn(A(cell), A(0.5))), stride);
}

// Return the pixels of a box side, (2 s)^2 * anchor, where the anchor is in pixels.
template <typename A>
TORCH_FASTDET_HOST_DEVICE A side_of(A s, A anchor) {
  const A root = mul_rn(s, A(2));
  return mul_rn(mul_rn(root, root), anchor);
}

// Hold the highest logit(i) of a softmax, the sum of exp(logit - highest), and the sum of these terms times their bins.
template <typename A>
struct SoftmaxBins {
  A highest, total, weighted;
};

template <typename A, typename Logit>
TORCH_FASTDET_HOST_DEVICE SoftmaxBins<A> softmax_bins(int count, Logit logit) {
  SoftmaxBins<A> bins{logit(0), 0, 0};
  if (count == 16) {  // the usual head: load every logit once, all at the same time
    A values[16];
    TORCH_FASTDET_UNROLL
    for (int i = 0; i < 16; ++i) values[i] = logit(i);
    TORCH_FASTDET_UNROLL
    for (int i = 1; i < 16; ++i) bins.highest = values[i] > bins.highest ? values[i] : bins.highest;
    TORCH_FASTDET_UNROLL
    for (int i = 0; i < 16; ++i) {
      const A weight = exp_rn(sub_rn(values[i], bins.highest));
      bins.total = add_rn(bins.total, weight);
      bins.weighted = add_rn(bins.weighted, mul_rn(weight, A(i)));
    }
    return bins;
  }
  for (int i = 1; i < count; ++i) {
    const A value = logit(i);
    bins.highest = value > bins.highest ? value : bins.highest;
  }
  for (int i = 0; i < count; ++i) {
    const A weight = exp_rn(sub_rn(logit(i), bins.highest));
    bins.total = add_rn(bins.total, weight);
    bins.weighted = add_rn(bins.weighted, mul_rn(weight, A(i)));
  }
  return bins;
}

// Return the distance of one box side in cells: the expectation of softmax(logits) over bins 0..count-1.
template <typename A, typename Logit>
TORCH_FASTDET_HOST_DEVICE A expected_bin(int count, Logit logit) {
  if (count == 1) return logit(0);  // models without DFL regress the distance itself
  const SoftmaxBins<A> bins = softmax_bins<A>(count, logit);
  return div_rn(bins.weighted, bins.total);
}

// Hold a cosine and a sine. They are computed in double, so that float results are the nearest on every device.
template <typename A>
struct Direction {
  A cosine, sine;
};

template <typename A>
TORCH_FASTDET_HOST_DEVICE Direction<A> direction_of(A angle) {
  double x = static_cast<double>(angle);
  if (!(x > -1e5 && x < 1e5)) x = fmod(x, 6.283185307179586);
  const double kRound = 6755399441055744.;  // 1.5 * 2^52: adding it rounds to an integer
  const double quarters = sub_rn(add_rn(mul_rn(x, 0.6366197723675814), kRound), kRound);
  double r = sub_rn(x, mul_rn(quarters, 1.57079632673412561417));  // Cody and Waite's reduction
  r = sub_rn(r, mul_rn(quarters, 6.07710050650619224932e-11));
  const double z = mul_rn(r, r);
  double s = 1.58969099521155010221e-10;  // the polynomials are those of fdlibm
  s = add_rn(mul_rn(s, z), -2.50507602534068634195e-08);
  s = add_rn(mul_rn(s, z), 2.75573137070700676789e-06);
  s = add_rn(mul_rn(s, z), -1.98412698298579493134e-04);
  s = add_rn(mul_rn(s, z), 8.33333333332248946124e-03);
  s = add_rn(mul_rn(s, z), -1.66666666666666324348e-01);
  s = add_rn(mul_rn(mul_rn(s, z), r), r);
  double c = -1.13596475577881948265e-11;
  c = add_rn(mul_rn(c, z), 2.08757232129817482790e-09);
  c = add_rn(mul_rn(c, z), -2.75573143513906633035e-07);
  c = add_rn(mul_rn(c, z), 2.48015872894767294178e-05);
  c = add_rn(mul_rn(c, z), -1.38888888888741095749e-03);
  c = add_rn(mul_rn(c, z), 4.16666666666666019037e-02);
  c = add_rn(sub_rn(mul_rn(mul_rn(c, z), z), mul_rn(z, 0.5)), 1.);
  if (!(z >= 0)) return {static_cast<A>(z), static_cast<A>(z)};  // NaN
  const int quadrant = static_cast<int>(static_cast<int64_t>(quarters) & 3);
  const double cosine = quadrant & 1 ? s : c, sine = quadrant & 1 ? c : s;
  return {static_cast<A>(quadrant == 1 || quadrant == 2 ? -cosine : cosine),
          static_cast<A>(quadrant >= 2 ? -sine : sine)};
}

// Return a rotated box from its sides' distances to the center of cell (column, row), along the box's own axes.
template <typename A>
TORCH_FASTDET_HOST_DEVICE CenterBox<A> decode_rotated(const A (&distance)[4], A angle, int64_t column, int64_t row,
                                                      A stride) {
  const Direction<A> d = direction_of(angle);
  const A along = mul_rn(sub_rn(distance[2], distance[0]), A(0.5));
  const A across = mul_rn(sub_rn(distance[3], distance[1]), A(0.5));
  const A x = sub_rn(mul_rn(along, d.cosine), mul_rn(across, d.sine));
  const A y = add_rn(mul_rn(along, d.sine), mul_rn(across, d.cosine));
  return {mul_rn(add_rn(x, add_rn(A(column), A(0.5))), stride), mul_rn(add_rn(y, add_rn(A(row), A(0.5))), stride),
          mul_rn(add_rn(distance[0], distance[2]), stride), mul_rn(add_rn(distance[1], distance[3]), stride)};
}

// Return a box from its sides' distances (left, top, right, bottom; in cells) to the center of cell (column, row).
template <typename A>
TORCH_FASTDET_HOST_DEVICE CenterBox<A> decode_distances(const A (&distance)[4], int64_t column, int64_t row, A stride) {
  const A x = add_rn(A(column), A(0.5)), y = add_rn(A(row), A(0.5));
  const A x1 = sub_rn(x, distance[0]), y1 = sub_rn(y, distance[1]);
  const A x2 = add_rn(x, distance[2]), y2 = add_rn(y, distance[3]);
  return {mul_rn(mul_rn(add_rn(x1, x2), A(0.5)), stride), mul_rn(mul_rn(add_rn(y1, y2), A(0.5)), stride),
          mul_rn(sub_rn(x2, x1), stride), mul_rn(sub_rn(y2, y1), stride)};
}

// A letterbox maps point p of the network's input to (p - pad) / gain in an original image of width x height pixels.
template <typename A>
struct Letterbox {
  A gain_x, gain_y, pad_x, pad_y, width, height;
};

template <typename A>
TORCH_FASTDET_HOST_DEVICE A clamp(A x, A low, A high) {
  return x < low ? low : (x > high ? high : x);
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE CornerBox<A> scale_corners(const CornerBox<A>& box, const Letterbox<A>& letterbox) {
  return {clamp(div_rn(sub_rn(box.x1, letterbox.pad_x), letterbox.gain_x), A(0), letterbox.width),
          clamp(div_rn(sub_rn(box.y1, letterbox.pad_y), letterbox.gain_y), A(0), letterbox.height),
          clamp(div_rn(sub_rn(box.x2, letterbox.pad_x), letterbox.gain_x), A(0), letterbox.width),
          clamp(div_rn(sub_rn(box.y2, letterbox.pad_y), letterbox.gain_y), A(0), letterbox.height)};
}

// Do the same for a box given as center and size, which is not clipped.
template <typename A>
TORCH_FASTDET_HOST_DEVICE CenterBox<A> scale_center(const CenterBox<A>& box, const Letterbox<A>& letterbox) {
  return {div_rn(sub_rn(box.x, letterbox.pad_x), letterbox.gain_x),
          div_rn(sub_rn(box.y, letterbox.pad_y), letterbox.gain_y), div_rn(box.width, letterbox.gain_x),
          div_rn(box.height, letterbox.gain_y)};
}

}  // namespace torch_fastdet::core
