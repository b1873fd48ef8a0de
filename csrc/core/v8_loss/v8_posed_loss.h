// The detection loss of YOLO26's poses compares keypoints (OKS, the object keypoint similarity) in its assignment, not
// boxes, and restricts a target's anchors to the levels for its size. All else is the detection loss.
#pragma once

#include "core/v8_loss/v8_keypoint_loss.h"
#include "core/v8_loss/v8_loss.h"

namespace torch_fastdet::core {

struct V8PosedLossParams : V8LossParams {
  V8KeypointProblem keypoints;  // no slots
};

// Return the levels for a target's size, which is 2 to 12 of their strides, or all if it has no anchor in these.
TORCH_FASTDET_HOST_DEVICE uint32_t v8_levels_of(const V8Heads& heads, const V8Target& target) {
  const float size = sqrtf(mul_rn(sub_rn(target.x2, target.x1), sub_rn(target.y2, target.y1)));
  uint32_t levels = 0;
  for (int i = 0; i < heads.num_levels; ++i) {
    const V8Level& level = heads.levels[i];
    const bool fits = (i == 0 || size >= mul_rn(level.stride, 2.f)) &&
                      (i + 1 == heads.num_levels || size <= mul_rn(level.stride, 12.f));
    if (!fits) continue;
    const V8Range range = v8_range(target, level.stride, level.nx, level.ny);
    bool found = false;
    for (int64_t y = range.y0; y < range.y1 && !found; ++y) {
      for (int64_t x = range.x0; x < range.x1 && !found; ++x) {
        found = v8_inside(target, v8_center(x, level.stride), v8_center(y, level.stride));
      }
    }
    if (found) levels |= 1u << i;
  }
  return levels == 0 ? ~0u : levels;
}

TORCH_FASTDET_HOST_DEVICE bool v8_read_target(const V8PosedLossParams& params, const float* row, V8Sides sides,
                                              V8Target& target) {
  if (!v8_target(row, params.heads.image_w, params.heads.image_h, sides, params.heads.nc, target)) return false;
  target.levels = v8_levels_of(params.heads, target);
  return true;
}

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE arithmetic_t<scalar_t> v8_overlap_of(const V8PosedLossParams& params, const V8Target& target,
                                                               const CornerBox<arithmetic_t<scalar_t>>& box,
                                                               int64_t anchor) {
  using T = arithmetic_t<scalar_t>;
  const V8KeypointProblem& p = params.keypoints;
  const V8Anchor at = v8_anchor(params.heads, anchor);
  const T stride = params.heads.levels[at.level].stride;
  const T area = T(target.x2 - target.x1) * T(target.y2 - target.y1) * T(0.53);
  T sum = 0;
  int visible = 0;
  for (int k = 0; k < p.keypoints; ++k) {
    const float* label = v8_keypoint_label(p, target.row, k);
    if (p.label_columns == 3 && !(label[2] > 0.f)) continue;
    ++visible;
    const auto logits = keypoint_logits<scalar_t>(p, target.image, anchor, k);
    const T dx = v8_keypoint_place(p, logits(0), T(at.column)) * stride - T(label[0]) * T(params.heads.image_w);
    const T dy = v8_keypoint_place(p, logits(1), T(at.row)) * stride - T(label[1]) * T(params.heads.image_h);
    const T sigma = T(2) * T(p.sigmas[k]);
    sum += exp_rn(-((dx * dx + dy * dy) / (sigma * sigma * (area + T(1e-7)) * T(2))));
  }
  return visible == 0 ? v8_overlap(target, box) : sum / (T(visible) + T(1e-7));
}

cudaError_t launch_v8_posed_loss(const V8PosedLossParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
