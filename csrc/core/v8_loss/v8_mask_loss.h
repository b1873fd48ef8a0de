// Compute the mask part of Ultralytics' and YOLOv5's segmentation losses: for each anchor with a target, the entropy of
// its mask (coefficients x prototypes) and the target's mask within the target's box. No mask is stored in memory.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/common/storage.h"
#include "core/v8_loss/v8_loss_math.h"

namespace torch_fastdet::core {

constexpr int kV8MostMaskChannels = 128;
constexpr int64_t kV8PixelsOfPart = 4096;

// Describe a tensor (bs, channels, ...) by its strides, in elements.
struct V8Coefficients {
  void* at;
  int64_t stride_b, stride_c, stride_a;
};

struct V8Prototypes {
  void* at;
  int64_t stride_b, stride_c, stride_y, stride_x;
};

constexpr int kV8MaskLevels = 8;

enum class V8MaskType : int32_t { kUInt8, kInt32, kFloat32 };

// The forward pass leaves this for the backward pass, for each anchor that got a target (32 bytes).
struct V8MaskPositive {
  int64_t anchor;          // image * anchors + anchor
  int32_t x0, x1, y0, y1;  // the pixels of the target's box, half open
  int32_t mask;            // number of the target's mask, or the value of its pixels if an image has one mask
  float area;  // share of the image that the target's box covers; with levels, times the positives of its group
};

// Describe a level of YOLOv5's heads, whose matches are the positives. The loss is the mean over levels and images.
struct V8MaskLevel {
  int64_t first;        // index of its first anchor among all levels
  int64_t anchors;      // number of anchors of an image
  float columns, rows;  // number of cells
};

struct V8MaskProblem {
  DType dtype;  // of coefficients and prototypes
  V8Coefficients coefficients;
  V8Prototypes protos;
  const void* masks;  // (bs or n, height, width) contiguous
  V8MaskType mask_type;
  bool overlap;  // an image has one mask, whose pixels hold the number of their target in the image, from 1
  int64_t bs, anchors, height, width;
  int32_t channels;
  int32_t levels;  // groups of positives an image: 1, or YOLOv5's levels. A group is level * bs + image
};

struct V8MaskLossParams {
  V8MaskProblem problem;
  float image_w, image_h;  // pixels
  const float* targets;    // (n, 6) contiguous: image, class, x, y, w, h
  int64_t n;
  const int64_t* num_targets;  // device scalar: number of valid rows; null: all
  const double* settings;      // (kV8Settings); null for YOLOv5
  double gain;                 // for YOLOv5
  V8MaskLevel level[kV8MaskLevels];
  const int64_t* slot_anchor;  // (slots) from v8_loss; for YOLOv5 (levels, ..., n): the cell in the level
  const int64_t* slot_row;     // (slots); null for YOLOv5
  int64_t slots;
  V8MaskPositive* positives;  // (slots): group g starts at first[g]
  int64_t* first;             // (levels * bs + 1)
  void* unit_gradients;       // (slots, channels) T, d(sum over its pixels) / d(its coefficients)
  int32_t* numbers;           // scratch (levels, n): number of the row within its image, from 1
  void* partials;             // scratch (slots, v8_mask_parts, 1 + channels) T: sum over pixels and its gradient
  void* loss;                 // (1) T
  void* item;                 // (1) T
  void* scale;                // (1) T, d(loss) / d(sum over anchors of the mean over pixels / area)
};

struct V8MaskLossBackwardParams {
  V8MaskProblem problem;
  int64_t slots;
  const V8MaskPositive* positives;
  const int64_t* first;
  const void* unit_gradients;
  const void* scale;
  const void* grad_loss;                 // (1) T
  bool shared;                           // several positives of a group may share an anchor
  V8Coefficients coefficient_gradients;  // dense; null at: not wanted
  V8Prototypes proto_gradients;          // the same
};

TORCH_FASTDET_HOST_DEVICE float v8_mask_value(const V8MaskProblem& p, int64_t element) {
  if (p.mask_type == V8MaskType::kUInt8) return static_cast<float>(static_cast<const uint8_t*>(p.masks)[element]);
  if (p.mask_type == V8MaskType::kInt32) return static_cast<float>(static_cast<const int32_t*>(p.masks)[element]);
  return static_cast<const float*>(p.masks)[element];
}

TORCH_FASTDET_HOST_DEVICE float v8_wanted_mask(const V8MaskProblem& p, const V8MaskPositive& positive, int64_t image,
                                               int64_t y, int64_t x) {
  const int64_t pixel = y * p.width + x;
  if (!p.overlap) return v8_mask_value(p, positive.mask * p.height * p.width + pixel);
  return v8_mask_value(p, image * p.height * p.width + pixel) == static_cast<float>(positive.mask) ? 1.f : 0.f;
}

// Return the first whole number at or after `position`, clamped to [0, size].
TORCH_FASTDET_HOST_DEVICE int32_t v8_first_pixel(float position, int64_t size) {
  if (!(position > 0.f)) return 0;
  return position < static_cast<float>(size) ? static_cast<int32_t>(ceilf(position)) : static_cast<int32_t>(size);
}

// Return the image of a slot's anchor, or -1 for an empty slot.
TORCH_FASTDET_HOST_DEVICE int64_t v8_mask_image(const V8MaskLossParams& params, int64_t slot) {
  const int64_t anchor = params.slot_anchor[slot];
  if (anchor < 0 || params.slot_row) return anchor < 0 ? -1 : anchor / params.problem.anchors;
  return anchor / params.level[slot / (params.slots / params.problem.levels)].anchors;
}

TORCH_FASTDET_HOST_DEVICE int64_t v8_mask_row(const V8MaskLossParams& params, int64_t slot) {
  return params.slot_row ? params.slot_row[slot] : slot % params.n;
}

TORCH_FASTDET_HOST_DEVICE void v8_mask_side(float low, float high, int64_t size, int32_t& first, int32_t& end) {
  first = v8_first_pixel(low, size);
  end = v8_first_pixel(high, size);
  if (end < first) end = first;
}

// Return a slot's positive. `number` is its row's in the image, `group` its group's size. Edges round as in eager.
TORCH_FASTDET_HOST_DEVICE V8MaskPositive v8_mask_positive(const V8MaskLossParams& params, int64_t slot, int32_t number,
                                                          int64_t group) {
  const V8MaskProblem& p = params.problem;
  const int64_t row = v8_mask_row(params, slot);
  const float* box = params.targets + 6 * row;
  const auto width = static_cast<float>(p.width), height = static_cast<float>(p.height);
  V8MaskPositive positive{};
  positive.anchor = params.slot_anchor[slot];
  positive.mask = p.overlap ? number : static_cast<int32_t>(row);
  if (params.slot_row) {
    V8Target target;
    v8_target(box, params.image_w, params.image_h, {}, 1, target);
    const float x1 = div_rn(target.x1, params.image_w), y1 = div_rn(target.y1, params.image_h);
    const float x2 = div_rn(target.x2, params.image_w), y2 = div_rn(target.y2, params.image_h);
    v8_mask_side(mul_rn(x1, width), mul_rn(x2, width), p.width, positive.x0, positive.x1);
    v8_mask_side(mul_rn(y1, height), mul_rn(y2, height), p.height, positive.y0, positive.y1);
    positive.area = mul_rn(sub_rn(x2, x1), sub_rn(y2, y1));
  } else {
    const V8MaskLevel& level = params.level[slot / (params.slots / p.levels)];
    const int64_t image = positive.anchor / level.anchors;
    positive.anchor = image * p.anchors + level.first + positive.anchor % level.anchors;
    // Convert from shares to cells and back, as eager code does.
    const float x = div_rn(mul_rn(box[2], level.columns), level.columns);
    const float y = div_rn(mul_rn(box[3], level.rows), level.rows);
    const float w = div_rn(mul_rn(box[4], level.columns), level.columns);
    const float h = div_rn(mul_rn(box[5], level.rows), level.rows);
    const float half_w = mul_rn(mul_rn(w, width), 0.5f), half_h = mul_rn(mul_rn(h, height), 0.5f);
    v8_mask_side(sub_rn(mul_rn(x, width), half_w), add_rn(mul_rn(x, width), half_w), p.width, positive.x0, positive.x1);
    v8_mask_side(sub_rn(mul_rn(y, height), half_h), add_rn(mul_rn(y, height), half_h), p.height, positive.y0,
                 positive.y1);
    positive.area = mul_rn(w, h) * static_cast<float>(group);
  }
  return positive;
}

// Set loss, item and scale from the sum of the shares of all `count` positives.
template <typename T>
TORCH_FASTDET_HOST_DEVICE void v8_mask_finish(const V8MaskLossParams& params, double total, int64_t count) {
  const auto images = static_cast<double>(params.problem.bs);
  const double gain = count == 0        ? 0
                      : params.settings ? params.settings[kV8Box] / static_cast<double>(count)
                                        : params.gain / images;
  const double all = params.settings ? images * params.settings[kV8Weight] : images;
  *static_cast<T*>(params.item) = static_cast<T>(total * gain);
  *static_cast<T*>(params.loss) = static_cast<T>(total * gain * all);
  *static_cast<T*>(params.scale) = static_cast<T>(gain * all);
}

// Return the image of a row, or -1 if the row is in no image.
TORCH_FASTDET_HOST_DEVICE int64_t v8_row_image(const float* targets, int64_t row, int64_t bs) {
  const float image = targets[6 * row];
  return image > -1.f && image < static_cast<float>(bs) ? static_cast<int64_t>(image) : -1;
}

// Return the factor of a positive's sum over pixels in the item, without the gain.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_mask_share(const V8MaskProblem& p, const V8MaskPositive& positive) {
  return T(1) / (T(p.height) * T(p.width) * T(positive.area));
}

// Return the number of blocks for a positive's pixels; v8_busy_parts returns how many of them its box needs.
TORCH_FASTDET_HOST_DEVICE int64_t v8_mask_parts(int64_t slots) {
  return slots >= 16384 ? 1 : slots >= 4096 ? 4 : 8;
}

TORCH_FASTDET_HOST_DEVICE int64_t v8_busy_parts(const V8MaskPositive& positive, int64_t parts) {
  const int64_t wanted =
      ceil_div(static_cast<int64_t>(positive.x1 - positive.x0) * (positive.y1 - positive.y0), kV8PixelsOfPart);
  return wanted < 1 ? 1 : wanted < parts ? wanted : parts;
}

cudaError_t launch_v8_mask_loss(const V8MaskLossParams& params, cudaStream_t stream);
cudaError_t launch_v8_mask_loss_backward(const V8MaskLossBackwardParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
