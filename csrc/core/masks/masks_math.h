// Determine which prototype pixels a mask pixel depends on, what a box keeps, and the threshold.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/common/exact_math.h"
#include "core/common/yolo_math.h"
#include "core/masks/masks.h"

namespace torch_fastdet::core {

constexpr int kMostTaps = 3;

// Return a * b + c, rounded once on every machine. (It is slow on a CPU without the instruction, but the same.)
TORCH_FASTDET_HOST_DEVICE float multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// Neighbours along one axis are pixels first, first + 1, ... (none beyond the axis' last one) with these weights.
struct alignas(16) MaskTaps {
  int32_t first;
  float weight[kMostTaps];
};

// Return how many neighbours a pixel has: 1 without resampling, 2 after one bilinear step, 3 after two.
inline int tap_count(const MaskAxis& axis) {
  const bool resampled = axis.span != axis.size;
  return axis.factor > 1 ? (resampled ? 3 : 2) : (resampled ? 2 : 1);
}

TORCH_FASTDET_HOST_DEVICE int32_t last_pixel(const MaskAxis& axis) {
  return (axis.factor > 1 ? axis.in : axis.begin + axis.span) - 1;
}

// Compute one bilinear step: the lower neighbour among `count` pixels, and the upper one's weight.
TORCH_FASTDET_HOST_DEVICE int32_t lower_neighbour(int32_t pixel, float scale, int32_t count, float* upper) {
  const float source = sub_rn(mul_rn(scale, add_rn(static_cast<float>(pixel), 0.5f)), 0.5f);
  const float position = source > 0.f ? source : 0.f;
  const int32_t floor = static_cast<int32_t>(position);
  const int32_t lower = floor < count - 1 ? floor : count - 1;
  const float weight = sub_rn(position, static_cast<float>(lower));
  *upper = weight < 1.f ? weight : 1.f;
  return lower;
}

TORCH_FASTDET_HOST_DEVICE MaskTaps taps_of(const MaskAxis& axis, int32_t pixel) {
  float upper;
  const float scale = div_rn(static_cast<float>(axis.span), static_cast<float>(axis.size));
  const int32_t lower = lower_neighbour(pixel, scale, axis.span, &upper);
  if (axis.factor == 1) return {axis.begin + lower, {sub_rn(1.f, upper), upper, 0.f}};
  // Each of the two pixels of the enlarged prototypes depends on two pixels in turn.
  MaskTaps taps{0, {0.f, 0.f, 0.f}};
  const float enlarged = reciprocal_rn(static_cast<float>(axis.factor));
  for (int step = 0; step < 2; ++step) {
    const int32_t at = lower + step < axis.span ? lower + step : axis.span - 1;
    float weight;
    const int32_t pixel_low = lower_neighbour(axis.begin + at, enlarged, axis.in, &weight);
    if (step == 0) taps.first = pixel_low;
    const float share = step == 0 ? sub_rn(1.f, upper) : upper;
    const int32_t offset = pixel_low - taps.first;  // 0 or 1
    const float low = mul_rn(share, sub_rn(1.f, weight)), high = mul_rn(share, weight);
    if (offset == 0) {
      taps.weight[0] = add_rn(taps.weight[0], low);
      taps.weight[1] = add_rn(taps.weight[1], high);
    } else {
      taps.weight[1] = add_rn(taps.weight[1], low);
      taps.weight[2] = add_rn(taps.weight[2], high);
    }
  }
  return taps;
}

// A range includes pixels low <= i < high.
struct PixelRange {
  int32_t low, high;
};

// Return the pixels i of 0..size-1 with i >= from and i < to, or none if either is NaN.
TORCH_FASTDET_HOST_DEVICE PixelRange pixels_between(float from, float to, int32_t size) {
  const float end = static_cast<float>(size);
  const int32_t low = from <= 0.f ? 0 : (from < end ? static_cast<int32_t>(ceilf(from)) : size);
  const int32_t high = to >= end ? size : (to > 0.f ? static_cast<int32_t>(ceilf(to)) : 0);
  return {low, high > low ? high : low};
}

// A box keeps these pixels of the mask or, if cropping first, of the prototypes.
struct MaskBox {
  PixelRange rows, columns;
};

TORCH_FASTDET_HOST_DEVICE MaskBox kept_by_box(const MasksParams& p, int64_t image, int64_t index) {
  const float* box = p.boxes + image * p.box_stride[0] + index * p.box_stride[1];
  return {pixels_between(mul_rn(box[1], p.scale_y), mul_rn(box[3], p.scale_y), p.crop_first ? p.rows.in : p.rows.size),
          pixels_between(mul_rn(box[0], p.scale_x), mul_rn(box[2], p.scale_x),
                         p.crop_first ? p.columns.in : p.columns.size)};
}

TORCH_FASTDET_HOST_DEVICE bool is_empty(const MaskBox& box) {
  return box.rows.low >= box.rows.high || box.columns.low >= box.columns.high;
}

TORCH_FASTDET_HOST_DEVICE bool is_inside(const MaskBox& box, int32_t row, int32_t column) {
  return row >= box.rows.low && row < box.rows.high && column >= box.columns.low && column < box.columns.high;
}

// Mix the values at kTaps neighbours. The order of the additions is fixed.
template <int kTaps>
TORCH_FASTDET_HOST_DEVICE float mix(const float (&values)[kTaps], const MaskTaps& taps) {
  if (kTaps == 1) return values[0];
  float sum = mul_rn(taps.weight[0], values[0]);
  for (int t = 1; t < kTaps; ++t) sum = multiply_add(taps.weight[t], values[t], sum);
  return sum;
}

// Return the threshold minus the first neighbour, and each other one's difference: each costs one multiply-add.
template <int kTaps>
TORCH_FASTDET_HOST_DEVICE void distances(float (&values)[kTaps], float threshold) {
  for (int t = 1; t < kTaps; ++t) values[t] = sub_rn(values[0], values[t]);
  values[0] = sub_rn(threshold, values[0]);
}

// Keep a pixel if this is negative. The arguments are the weights of the neighbours after the first.
template <int kTaps>
TORCH_FASTDET_HOST_DEVICE float distance(const float (&of)[kTaps], float second, float third) {
  float sum = of[0];
  if (kTaps > 1) sum = multiply_add(second, of[kTaps > 1 ? 1 : 0], sum);
  if (kTaps > 2) sum = multiply_add(third, of[kTaps > 2 ? 2 : 0], sum);
  return sum;
}

TORCH_FASTDET_HOST_DEVICE float threshold_of(const MasksParams& p) {
  return p.sigmoid ? 0.5f : 0.f;
}

inline int64_t packed_bytes(int64_t width) {
  return ceil_div(width, 8);
}

}  // namespace torch_fastdet::core
