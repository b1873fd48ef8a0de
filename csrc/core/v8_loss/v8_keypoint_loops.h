// Compute the keypoint parts of the pose loss on the CPU, slot by slot, as there are few.
#pragma once

#include <algorithm>

#include "core/v8_loss/v8_keypoint_loss.h"

namespace torch_fastdet::core::v8_loops {

template <typename T>
int visible_keypoints(const V8KeypointProblem& p, const V8KeypointSlot<T>& slot) {
  int visible = 0;
  for (int k = 0; k < p.keypoints; ++k) visible += v8_keypoint_visible(p, slot.row, k) ? 1 : 0;
  return visible;
}

template <typename scalar_t>
void keypoint_forward(const V8KeypointLossParams& params) {
  using T = arithmetic_t<scalar_t>;
  const V8KeypointProblem& p = params.problem;
  double sums[2] = {};
  int64_t positives = 0;
  for (int64_t i = 0; i < p.slots; ++i) {
    if (p.slot_anchor[i] < 0) continue;
    ++positives;
    const auto slot = v8_keypoint_slot<T>(p, i);
    const T share = v8_keypoint_share<T>(p, visible_keypoints(p, slot));
    for (int k = 0; k < p.keypoints; ++k) {
      const bool visible = v8_keypoint_visible(p, slot.row, k);
      const auto logits = keypoint_logits<scalar_t>(p, slot.image, slot.anchor, k);
      T gradient[2];
      const T distance = v8_keypoint_distance(p, slot, k, logits(0), logits(1), gradient);
      sums[0] += static_cast<double>(share * distance * T(visible ? 1 : 0));
      if (p.columns == 3) sums[1] += static_cast<double>(v8_softplus(logits(2)) - (visible ? logits(2) : T(0)));
    }
  }
  v8_keypoint_finish<T>(params, sums, static_cast<double>(positives));
}

template <typename scalar_t>
void keypoint_backward(const V8KeypointLossBackwardParams& params) {
  using T = arithmetic_t<scalar_t>;
  const V8KeypointProblem& p = params.problem;
  const T* grads = static_cast<const T*>(params.grad_loss);
  const T* scales = static_cast<const T*>(params.scales);
  std::fill_n(static_cast<scalar_t*>(params.gradient), p.heads.bs * p.keypoints * p.columns * p.heads.anchors,
              from_arithmetic<scalar_t>(0));
  for (int64_t i = 0; i < p.slots; ++i) {
    if (p.slot_anchor[i] < 0) continue;
    const auto slot = v8_keypoint_slot<T>(p, i);
    const T by_distance = grads[0] * scales[0] * v8_keypoint_share<T>(p, visible_keypoints(p, slot));
    const T by_visibility = grads[params.grad_stride] * scales[1];
    for (int k = 0; k < p.keypoints; ++k) v8_keypoint_gradient<scalar_t>(params, slot, k, by_distance, by_visibility);
  }
}

}  // namespace torch_fastdet::core::v8_loops
