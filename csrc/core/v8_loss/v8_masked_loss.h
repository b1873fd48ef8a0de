// The detection loss of YOLO26's segmentation also compares masks in its assignment: the overlap of an anchor and a
// target is the mean of the boxes' CIoU and the masks' IoU. Masks are compared only for each target's best anchors by
// score and CIoU; for others their IoU is 0. All else is the detection loss.
#pragma once

#include "core/v8_loss/v8_loss.h"
#include "core/v8_loss/v8_mask_loss.h"

namespace torch_fastdet::core {

constexpr int kV8NearFactor = 3;  // masks are compared for this many times topk anchors

struct V8MaskedLossParams : V8LossParams {
  V8MaskProblem masks;  // levels: 1; masks of any size
  int64_t mask_height, mask_width;
  int32_t near;          // anchors of a target whose masks are compared
  int64_t* near_anchor;  // scratch (n, near) by rows of targets: the anchor in its image, or -1
  void* near_overlap;    // scratch (n, near) T
  float* mask_area;      // scratch (n): pixels of each row's mask
  int32_t* mask_number;  // scratch (n): number of the row within its image, from 1
};

// Rank by CIoU alone the anchors of a target whose masks will be compared. The key is never 0, even without overlap.
template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE uint64_t v8_near_key(const V8MaskedLossParams& params, const V8Target& target,
                                               const V8Anchor& at) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const int64_t anchor = heads.levels[at.level].first + at.index;
  const T overlap =
      v8_overlap(target, static_cast<const CornerBox<T>*>(params.scratch.boxes)[target.image * heads.anchors + anchor]);
  const T alignment = v8_alignment(class_logit<scalar_t>(heads, target.image, at, target.lookup), overlap,
                                   static_cast<T>(params.settings[kV8Alpha]), static_cast<T>(params.settings[kV8Beta]));
  return v8_key(add_rn(alignment, T(1e-9)), anchor);
}

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE arithmetic_t<scalar_t> v8_overlap_of(const V8MaskedLossParams& params, const V8Target& target,
                                                               const CornerBox<arithmetic_t<scalar_t>>& box,
                                                               int64_t anchor) {
  using T = arithmetic_t<scalar_t>;
  T sum = v8_overlap(target, box);
  for (int64_t i = int64_t{target.row} * params.near; i < int64_t{target.row + 1} * params.near; ++i) {
    if (params.near_anchor[i] == anchor) return (sum + static_cast<const T*>(params.near_overlap)[i]) * T(0.5);
  }
  return sum * T(0.5);
}

// Return 1 if a target's mask (nearest; above 0.5 if masks do not overlap) covers a pixel of the prototypes, else 0.
TORCH_FASTDET_HOST_DEVICE float v8_near_mask(const V8MaskedLossParams& params, int64_t image, int64_t row,
                                             int32_t number, int64_t y, int64_t x) {
  const V8MaskProblem& p = params.masks;
  if (params.mask_height != p.height) {
    y = static_cast<int64_t>(
        floorf(static_cast<float>(y) * (static_cast<float>(params.mask_height) / static_cast<float>(p.height))));
    y = y < params.mask_height ? y : params.mask_height - 1;
  }
  if (params.mask_width != p.width) {
    x = static_cast<int64_t>(
        floorf(static_cast<float>(x) * (static_cast<float>(params.mask_width) / static_cast<float>(p.width))));
    x = x < params.mask_width ? x : params.mask_width - 1;
  }
  const int64_t pixel = y * params.mask_width + x, size = params.mask_height * params.mask_width;
  if (!p.overlap) return v8_mask_value(p, row * size + pixel) > 0.5f ? 1.f : 0.f;
  return v8_mask_value(p, image * size + pixel) == static_cast<float>(number) ? 1.f : 0.f;
}

// Hold the pixels of the prototypes inside a predicted box, half open. The heights' ratio scales both axes.
struct V8Pixels {
  int32_t x0, x1, y0, y1;
};

template <typename T>
TORCH_FASTDET_HOST_DEVICE V8Pixels v8_box_pixels(const V8MaskedLossParams& params, const CornerBox<T>& box) {
  const V8MaskProblem& p = params.masks;
  const float scale = static_cast<float>(static_cast<double>(p.height) / static_cast<double>(params.heads.image_h));
  V8Pixels pixels{};
  v8_mask_side(mul_rn(static_cast<float>(box.x1), scale), mul_rn(static_cast<float>(box.x2), scale), p.width, pixels.x0,
               pixels.x1);
  v8_mask_side(mul_rn(static_cast<float>(box.y1), scale), mul_rn(static_cast<float>(box.y2), scale), p.height,
               pixels.y0, pixels.y1);
  return pixels;
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_mask_iou(T both, T predicted, T wanted) {
  const T all = predicted + wanted - both;
  return both / (all < T(1) ? T(1) : all);
}

cudaError_t launch_v8_masked_loss(const V8MaskedLossParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
