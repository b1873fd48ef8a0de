// Compute the v8 detection loss one box, one anchor or one logit at a time, for CPU and CUDA.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#include "core/boxes/box_math.h"
#include "core/common/exact_math.h"
#include "core/common/host_device.h"
#include "core/common/log_math.h"
#include "core/common/yolo_math.h"

namespace torch_fastdet::core {

// Captured graphs read these from device memory: gains, this loss's weight in a sum, settings of the assignment.
enum V8Setting : int {
  kV8Box,
  kV8Cls,
  kV8Dfl,
  kV8Weight,
  kV8Alpha,
  kV8Beta,
  kV8Eps,
  kV8LeastSide,  // size to which short sides of a box are enlarged, in pixels
  kV8ShortSide,  // sides below this size are short
  kV8Settings
};

struct V8Sides {
  float least, below;
};

TORCH_FASTDET_HOST_DEVICE V8Sides v8_sides(const double* settings) {
  return {static_cast<float>(settings[kV8LeastSide]), static_cast<float>(settings[kV8ShortSide])};
}

constexpr float kV8Inside = 1e-9f;  // minimum distance of an anchor from a box's border, in pixels

// Hold a target in pixels, in fp32. Each step rounds as in eager, so that anchors on a box's edge are treated alike.
struct alignas(16) V8Target {
  float x1, y1, x2, y2;
  float low_x, low_y, high_x, high_y;  // where anchors may be: the box, with short sides enlarged
  int32_t image;
  int32_t label;          // the positive class
  int32_t lookup;         // the class whose score ranks the anchors; negative labels count from the last class
  int32_t row;            // row of the targets
  uint32_t levels = ~0u;  // one bit for each level where its anchors may be
};

// Return a row's bad column + 1, or 0. Indices are truncated as in eager; boxes may lie outside the image.
TORCH_FASTDET_HOST_DEVICE int v8_target_fault(const float row[6], int64_t batch_size, int64_t classes) {
  if (!(row[0] > -1.0f && row[0] < static_cast<float>(batch_size))) return 1;
  if (!(row[1] > -static_cast<float>(classes) - 1.0f && row[1] < static_cast<float>(classes))) return 2;
  return 0;
}

TORCH_FASTDET_HOST_DEVICE void v8_grow(float low, float high, V8Sides sides, float& grown_low, float& grown_high) {
  const float center = mul_rn(add_rn(low, high), 0.5f);
  const float side = sub_rn(high, low);
  const float half = mul_rn(side < sides.below ? sides.least : side, 0.5f);
  grown_low = sub_rn(center, half);
  grown_high = add_rn(center, half);
}

// Return false for a box that the original drops: its corners add up to 0 or less, or to NaN. `row` must have no fault.
TORCH_FASTDET_HOST_DEVICE bool v8_target(const float row[6], float image_w, float image_h, V8Sides sides,
                                         int64_t classes, V8Target& target) {
  const float x = mul_rn(row[2], image_w), y = mul_rn(row[3], image_h);
  const float half_w = mul_rn(mul_rn(row[4], image_w), 0.5f), half_h = mul_rn(mul_rn(row[5], image_h), 0.5f);
  target.x1 = sub_rn(x, half_w);
  target.y1 = sub_rn(y, half_h);
  target.x2 = add_rn(x, half_w);
  target.y2 = add_rn(y, half_h);
  v8_grow(target.x1, target.x2, sides, target.low_x, target.high_x);
  v8_grow(target.y1, target.y2, sides, target.low_y, target.high_y);
  target.image = static_cast<int32_t>(row[0]);
  const auto label = static_cast<int32_t>(row[1]);
  target.lookup = label < 0 ? label + static_cast<int32_t>(classes) : label;
  target.label = label < 0 ? 0 : label;
  return add_rn(add_rn(target.x1, target.y1), add_rn(target.x2, target.y2)) > 0.0f;
}

TORCH_FASTDET_HOST_DEVICE int64_t v8_cell(float position, int64_t cells) {
  if (!(position > 0.0f)) return 0;
  return position >= static_cast<float>(cells) ? cells : static_cast<int64_t>(position);
}

// Hold the columns and rows of a level that may lie inside a target, half open; v8_inside decides.
struct V8Range {
  int64_t x0, x1, y0, y1;
};

TORCH_FASTDET_HOST_DEVICE V8Range v8_range(const V8Target& target, float stride, int64_t nx, int64_t ny) {
  V8Range range{v8_cell(target.low_x / stride - 1.5f, nx), v8_cell(target.high_x / stride + 1.5f, nx),
                v8_cell(target.low_y / stride - 1.5f, ny), v8_cell(target.high_y / stride + 1.5f, ny)};
  if (range.x1 < range.x0) range.x1 = range.x0;
  if (range.y1 < range.y0) range.y1 = range.y0;
  return range;
}

TORCH_FASTDET_HOST_DEVICE float v8_center(int64_t i, float stride) {
  return mul_rn(static_cast<float>(i) + 0.5f, stride);
}

TORCH_FASTDET_HOST_DEVICE bool v8_inside(const V8Target& target, float x, float y) {
  return sub_rn(x, target.low_x) > kV8Inside && sub_rn(y, target.low_y) > kV8Inside &&
         sub_rn(target.high_x, x) > kV8Inside && sub_rn(target.high_y, y) > kV8Inside;
}

// Return the CIoU of a target and a predicted box in pixels, at least 0; NaN stays NaN.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_overlap(const V8Target& target, const CornerBox<T>& box) {
  constexpr T kEps = T(1e-7);
  const T overlap = box_iou<IouKind::kCiou>(box_from_xyxy(T(target.x1), T(target.y1), T(target.x2), T(target.y2), kEps),
                                            box_from_xyxy(box.x1, box.y1, box.x2, box.y2, kEps), kEps);
  return overlap < T(0) ? T(0) : overlap;
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_power(T x, T exponent) {
  if (exponent == T(0.5)) return sqrt(x);
  if (exponent == T(6)) {
    const T cube = mul_rn(mul_rn(x, x), x);
    return mul_rn(cube, cube);
  }
  return pow(x, exponent);
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_alignment(T logit, T overlap, T alpha, T beta) {
  return mul_rn(v8_power(sigmoid(logit), alpha), v8_power(overlap, beta));
}

// Keys sort by value, NaN first, then by index, lowest first. A value that is not above 0 has key 0.
template <typename T>
TORCH_FASTDET_HOST_DEVICE uint64_t v8_key(T value, int64_t index) {
  const float narrow = static_cast<float>(value);
  if (narrow <= 0.0f) return 0;
  const uint32_t bits = narrow != narrow ? 0x7fffffffu : float_bits(narrow);
  return (static_cast<uint64_t>(bits) << 32) | (0xffffffffu - static_cast<uint32_t>(index));
}

TORCH_FASTDET_HOST_DEVICE int64_t v8_key_index(uint64_t key) {
  return static_cast<int64_t>(0xffffffffu - static_cast<uint32_t>(key));
}

// Map values of at least 0 to integers of the same order, with NaN above all, for atomicMax.
TORCH_FASTDET_HOST_DEVICE uint64_t v8_order(double value) {
  if (value != value) return 0x7fffffffffffffffu;
#ifdef __CUDA_ARCH__
  return static_cast<uint64_t>(__double_as_longlong(value));
#else
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

TORCH_FASTDET_HOST_DEVICE double v8_ordered(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __longlong_as_double(static_cast<long long>(bits));
#else
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// Return an anchor's target score: its alignment, scaled so that the target's best anchor gets the best overlap.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_score(T alignment, uint64_t best_alignment, uint64_t best_overlap, T eps) {
  return alignment * static_cast<T>(v8_ordered(best_overlap)) / (static_cast<T>(v8_ordered(best_alignment)) + eps);
}

// Return log(1 + exp(x)), the entropy of a negative class.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_softplus(T x) {
  const T rest = log1p_of_share(exp_rn(-magnitude(x)));
  return x > T(0) ? x + rest : rest;
}

// Hold an anchor and its target, in cells of the anchor's level.
template <typename T>
struct V8Pair {
  T x, y;            // the anchor
  T x1, y1, x2, y2;  // the target
};

template <typename T>
TORCH_FASTDET_HOST_DEVICE V8Pair<T> v8_pair(const V8Target& target, int64_t column, int64_t row, T stride) {
  return {T(column) + T(0.5),    T(row) + T(0.5),       T(target.x1) / stride,
          T(target.y1) / stride, T(target.x2) / stride, T(target.y2) / stride};
}

// Return the CIoU of the predicted and the wanted box, and the gradient of 1 - CIoU by the four predicted distances.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_box_term(const V8Pair<T>& pair, const T (&distance)[4], T (&gradient)[4]) {
  constexpr T kEps = T(1e-7);
  const Box<T> predicted =
      box_from_xyxy(pair.x - distance[0], pair.y - distance[1], pair.x + distance[2], pair.y + distance[3], kEps);
  const Box<T> wanted = box_from_xyxy(pair.x1, pair.y1, pair.x2, pair.y2, kEps);
  Box<T> by_predicted, by_wanted;
  const T ciou = box_iou_grad<IouKind::kCiou>(predicted, wanted, kEps, T(-1), by_predicted, by_wanted);
  T corners[4];
  fold_box_grad(by_predicted, false, corners);
  gradient[0] = -corners[0];
  gradient[1] = -corners[1];
  gradient[2] = corners[2];
  gradient[3] = corners[3];
  return ciou;
}

// Return the position of side 0 to 3 (left, top, right, bottom) of the target, in cells from the anchor.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_wanted_distance(const V8Pair<T>& pair, int side) {
  const T far = side == 0 ? pair.x1 : side == 1 ? pair.y1 : side == 2 ? pair.x2 : pair.y2;
  const T anchor = side % 2 == 0 ? pair.x : pair.y;
  return side < 2 ? anchor - far : far - anchor;
}

// Hold the two bins between which a distance lies, and their shares.
template <typename T>
struct V8Bins {
  int left;
  T left_share, right_share;
};

template <typename T>
TORCH_FASTDET_HOST_DEVICE V8Bins<T> v8_bins(T distance, int reg_max) {
  const T highest = T(reg_max - 1) - T(0.01);
  distance = distance > T(0) ? (distance < highest ? distance : highest) : T(0);
  V8Bins<T> bins{static_cast<int>(distance), 0, 0};
  bins.left_share = T(bins.left + 1) - distance;
  bins.right_share = T(1) - bins.left_share;
  return bins;
}

// Hold one side of a box: its value, and what its gradient needs.
template <typename T>
struct V8Side {
  T distance;  // predicted
  SoftmaxBins<T> softmax;
};

template <typename T, typename Logit>
TORCH_FASTDET_HOST_DEVICE V8Side<T> v8_side(int reg_max, Logit logit) {
  V8Side<T> side{};
  if (reg_max == 1) {
    side.distance = logit(0);
  } else {
    side.softmax = softmax_bins<T>(reg_max, logit);
    side.distance = div_rn(side.softmax.weighted, side.softmax.total);
  }
  return side;
}

// Return the distance part of one side, a quarter of the anchor's: the distribution focal loss or, if distances are
// regressed directly, the difference as a share of the image (`share`: one cell over its width or height).
template <typename T, typename Logit>
TORCH_FASTDET_HOST_DEVICE T v8_distance_term(const V8Side<T>& side, T wanted, T share, int reg_max, Logit logit) {
  if (reg_max == 1) return fabs(side.distance * share - wanted * share) * T(0.25);
  const V8Bins<T> bins = v8_bins(wanted, reg_max);
  const T normaliser = side.softmax.highest + log(side.softmax.total);
  return ((normaliser - logit(bins.left)) * bins.left_share + (normaliser - logit(bins.left + 1)) * bins.right_share) *
         T(0.25);
}

// Return the gradient of logit i of one side. `by_distance` is the box part's; `scale` multiplies the distance part's.
template <typename T, typename Logit>
TORCH_FASTDET_HOST_DEVICE T v8_side_gradient(const V8Side<T>& side, T wanted, T share, int reg_max, Logit logit, int i,
                                             T by_distance, T scale) {
  scale *= T(0.25);
  if (reg_max == 1) {
    const T difference = side.distance * share - wanted * share;
    const T sign = difference > T(0) ? T(1) : difference < T(0) ? T(-1) : difference;  // 0 and NaN stay
    return by_distance + scale * share * sign;
  }
  const V8Bins<T> bins = v8_bins(wanted, reg_max);
  const T probability = exp_rn(sub_rn(logit(i), side.softmax.highest)) / side.softmax.total;
  const T share_of_bin = i == bins.left ? bins.left_share : i == bins.left + 1 ? bins.right_share : T(0);
  return probability * (T(i) - side.distance) * by_distance + scale * (probability - share_of_bin);
}

}  // namespace torch_fastdet::core
