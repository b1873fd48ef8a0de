// Compute cv2.resize of 8-bit images, INTER_LINEAR and INTER_AREA, with identical bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/common/exact_math.h"
#include "core/common/host_device.h"

namespace torch_fastdet::core {

enum class Interpolation : int32_t { kLinear, kArea };

// Select how a pair of axes is resized. OpenCV chooses by the two scales together.
enum class ResizeRule : int32_t {
  kCopy,        // equal sizes
  kLinear,      // two taps per axis, weights in 1/2048
  kLinearArea,  // enlarging INTER_AREA: the same with other positions
  kBlocks,      // INTER_AREA with integer factors: the mean of a block
  kArea         // INTER_AREA otherwise: the mean with weights in float32
};

struct ResizeAxis {
  int source, target;
  double scale, inverse;  // source pixels per target pixel, and the inverse
};

TORCH_FASTDET_HOST_DEVICE ResizeAxis resize_axis(int source, int target) {
  const double inverse = div_rn(static_cast<double>(target), static_cast<double>(source));
  return {source, target, div_rn(1., inverse), inverse};
}

struct Resize {
  ResizeAxis x, y;
  ResizeRule rule;
};

TORCH_FASTDET_HOST_DEVICE bool is_whole(double scale) {
  const double rounded = ::rint(scale);
  return ::fabs(sub_rn(scale, rounded)) < 2.220446049250313e-16;
}

TORCH_FASTDET_HOST_DEVICE Resize make_resize(int source_w, int source_h, int target_w, int target_h,
                                             Interpolation interpolation) {
  Resize r{resize_axis(source_w, target_w), resize_axis(source_h, target_h), ResizeRule::kLinear};
  const bool whole = is_whole(r.x.scale) && is_whole(r.y.scale);
  const bool halves = whole && ::rint(r.x.scale) == 2 && ::rint(r.y.scale) == 2;
  if (source_w == target_w && source_h == target_h) {
    r.rule = ResizeRule::kCopy;
  } else if (interpolation == Interpolation::kLinear) {
    r.rule = halves ? ResizeRule::kBlocks : ResizeRule::kLinear;
  } else if (r.x.scale >= 1 && r.y.scale >= 1) {
    r.rule = whole ? ResizeRule::kBlocks : ResizeRule::kArea;
  } else {
    r.rule = ResizeRule::kLinearArea;
  }
  return r;
}

// Hold two neighbouring source pixels and their weights in 1/2048.
struct LinearTap {
  int first, second;
  int first_weight, second_weight;
};

TORCH_FASTDET_HOST_DEVICE int weight_2048(float x) {
  return static_cast<int>(::rintf(mul_rn(x, 2048.f)));
}

// Beyond the first or last column OpenCV sets the fraction to 0; beyond rows it repeats the row and keeps the fraction.
TORCH_FASTDET_HOST_DEVICE LinearTap linear_tap(const ResizeAxis& axis, int target, bool columns, bool area) {
  float fraction;
  int first;
  if (area) {
    first = static_cast<int>(::floor(mul_rn(static_cast<double>(target), axis.scale)));
    fraction = static_cast<float>(
        sub_rn(static_cast<double>(target + 1), mul_rn(static_cast<double>(first + 1), axis.inverse)));
    fraction = fraction <= 0 ? 0.f : sub_rn(fraction, ::floorf(fraction));
  } else {
    const float position =
        static_cast<float>(sub_rn(mul_rn(add_rn(static_cast<double>(target), 0.5), axis.scale), 0.5));
    first = static_cast<int>(::floorf(position));
    fraction = sub_rn(position, static_cast<float>(first));
  }
  const int last = axis.source - 1;
  if (columns && (first < 0 || first >= last)) {
    fraction = 0;
    first = first < 0 ? 0 : last;
  }
  const auto inside = [last](int i) { return i < 0 ? 0 : i > last ? last : i; };
  return {inside(first), inside(first + 1), weight_2048(sub_rn(1.f, fraction)), weight_2048(fraction)};
}

// Blend two pixels of a row to (p0 * w0 + p1 * w1) / 16, rounded down: at most 255 * 2048 / 16, which fits in 15 bits.
TORCH_FASTDET_HOST_DEVICE int blend_columns(int first, int second, int first_weight, int second_weight) {
  return (first * first_weight + second * second_weight) >> 4;
}

// Blend two such values, one below the other.
TORCH_FASTDET_HOST_DEVICE int blend_rows(int top, int bottom, int top_weight, int bottom_weight) {
  return (((top_weight * top) >> 16) + ((bottom_weight * bottom) >> 16) + 2) >> 2;
}

// One target pixel covers source pixels [first, last]. The first and the last one may count in part.
struct AreaTap {
  int first, last;
  float first_weight, weight, last_weight;
  TORCH_FASTDET_HOST_DEVICE float at(int i) const {
    return i == first ? first_weight : i == last ? last_weight : weight;
  }
};

TORCH_FASTDET_HOST_DEVICE AreaTap area_tap(const ResizeAxis& axis, int target) {
  const double begin = mul_rn(static_cast<double>(target), axis.scale);
  const double end = add_rn(begin, axis.scale);
  const double left = sub_rn(static_cast<double>(axis.source), begin);
  const double cell = axis.scale < left ? axis.scale : left;
  int from = static_cast<int>(::ceil(begin)), to = static_cast<int>(::floor(end));
  to = to < axis.source - 1 ? to : axis.source - 1;
  from = from < to ? from : to;
  const float whole = static_cast<float>(div_rn(1., cell));
  AreaTap tap{from, to - 1, whole, whole, whole};
  const double before = sub_rn(static_cast<double>(from), begin), after = sub_rn(end, static_cast<double>(to));
  if (before > 1e-3) {
    tap.first = from - 1;
    tap.first_weight = static_cast<float>(div_rn(before, cell));
  }
  if (after > 1e-3) {
    const double part = after < 1. ? after : 1.;
    tap.last = to;
    tap.last_weight = static_cast<float>(div_rn(part < cell ? part : cell, cell));
  }
  if (tap.first == tap.last && before <= 1e-3 && after > 1e-3) tap.first_weight = tap.last_weight;
  return tap;
}

TORCH_FASTDET_HOST_DEVICE int saturate_level(float x) {
  const int rounded = static_cast<int>(::rintf(x));
  return rounded < 0 ? 0 : rounded > 255 ? 255 : rounded;
}

// Compute one channel of one target pixel. `at(x, y)` returns the source's value.
template <typename At>
TORCH_FASTDET_HOST_DEVICE int resized_level(const Resize& r, int x, int y, const At& at) {
  if (r.rule == ResizeRule::kCopy) return at(x, y);
  if (r.rule == ResizeRule::kBlocks) {
    const int w = static_cast<int>(::rint(r.x.scale)), h = static_cast<int>(::rint(r.y.scale));
    int sum = 0;
    for (int j = 0; j < h; ++j) {
      for (int i = 0; i < w; ++i) sum += at(x * w + i, y * h + j);
    }
    if (w == 2 && h == 2) return (sum + 2) >> 2;
    return saturate_level(mul_rn(static_cast<float>(sum), div_rn(1.f, static_cast<float>(w * h))));
  }
  if (r.rule == ResizeRule::kArea) {
    const AreaTap tx = area_tap(r.x, x), ty = area_tap(r.y, y);
    float sum = 0;
    for (int j = ty.first; j <= ty.last; ++j) {
      float row = 0;
      for (int i = tx.first; i <= tx.last; ++i) row = add_rn(row, mul_rn(static_cast<float>(at(i, j)), tx.at(i)));
      sum = add_rn(sum, mul_rn(ty.at(j), row));
    }
    return saturate_level(sum);
  }
  const bool area = r.rule == ResizeRule::kLinearArea;
  const LinearTap tx = linear_tap(r.x, x, true, area), ty = linear_tap(r.y, y, false, area);
  const auto row = [&](int j) {
    return blend_columns(at(tx.first, j), at(tx.second, j), tx.first_weight, tx.second_weight);
  };
  return blend_rows(row(ty.first), row(ty.second), ty.first_weight, ty.second_weight);
}

}  // namespace torch_fastdet::core
