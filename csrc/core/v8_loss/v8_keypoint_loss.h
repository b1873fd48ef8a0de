// Compute the pose loss's keypoint parts: the distance of keypoints relative to the target, and visibility's entropy.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/v8_loss/v8_heads.h"
#include "core/v8_loss/v8_loss_math.h"

namespace torch_fastdet::core {

struct V8KeypointProblem {
  DType dtype;              // of the predictions
  const void* predictions;  // (bs, keypoints * columns, anchors) by the strides, in elements
  int64_t stride_b, stride_c, stride_a;
  V8Heads heads;               // levels, anchors, bs and sizes of images; no tensors
  const float* labels;         // (n, keypoints, label_columns) contiguous: shares of the image, and visibility
  const float* targets;        // (n, 6) contiguous
  const float* sigmas;         // (keypoints)
  const int64_t* slot_anchor;  // (slots) from v8_loss
  const int64_t* slot_row;
  int64_t slots;
  int32_t keypoints, columns, label_columns;  // columns: 2, or 3 with a logit for visibility
  bool centered;                              // YOLO26: a position is x + the anchor's center; else 2 x + its cell
};

struct V8KeypointLossParams {
  V8KeypointProblem problem;
  const double* gains;     // (2) of the distance and the visibility part
  const double* settings;  // (kV8Settings), for the weight
  void* partials;          // scratch (slots, 2) T
  void* loss;              // (2) T
  void* items;             // (2) T
  void* scales;            // (2) T, d(loss) / d(sum over slots and keypoints)
};

struct V8KeypointLossBackwardParams {
  V8KeypointProblem problem;
  const void* scales;
  const void* grad_loss;  // (2) T by the stride below
  int64_t grad_stride;
  void* gradient;  // dense
  int64_t gradient_b, gradient_c, gradient_a;
};

// Hold an anchor in a slot, its target, and values that all its keypoints share.
template <typename T>
struct V8KeypointSlot {
  int64_t image, anchor, row;
  T x, y;                    // the anchor's cell
  T by_image_w, by_image_h;  // cells of an image's width and height
  T area;                    // of the target's box, in cells
};

template <typename T>
TORCH_FASTDET_HOST_DEVICE V8KeypointSlot<T> v8_keypoint_slot(const V8KeypointProblem& p, int64_t slot) {
  const V8Heads& heads = p.heads;
  V8KeypointSlot<T> result{};
  result.image = p.slot_anchor[slot] / heads.anchors;
  result.anchor = p.slot_anchor[slot] % heads.anchors;
  result.row = p.slot_row[slot];
  const V8Anchor at = v8_anchor(heads, result.anchor);
  const float stride = heads.levels[at.level].stride;
  V8Target target;
  v8_target(p.targets + 6 * result.row, heads.image_w, heads.image_h, {}, 1, target);
  result.x = T(at.column);
  result.y = T(at.row);
  result.by_image_w = T(heads.image_w) / T(stride);
  result.by_image_h = T(heads.image_h) / T(stride);
  result.area =
      (T(target.x2) / T(stride) - T(target.x1) / T(stride)) * (T(target.y2) / T(stride) - T(target.y1) / T(stride));
  return result;
}

TORCH_FASTDET_HOST_DEVICE const float* v8_keypoint_label(const V8KeypointProblem& p, int64_t row, int keypoint) {
  return p.labels + (row * p.keypoints + keypoint) * p.label_columns;
}

TORCH_FASTDET_HOST_DEVICE bool v8_keypoint_visible(const V8KeypointProblem& p, int64_t row, int keypoint) {
  return p.label_columns < 3 || v8_keypoint_label(p, row, keypoint)[2] != 0.f;
}

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE V8Logits<scalar_t> keypoint_logits(const V8KeypointProblem& p, int64_t image, int64_t anchor,
                                                             int keypoint) {
  return {static_cast<const scalar_t*>(p.predictions) + image * p.stride_b + anchor * p.stride_a +
              keypoint * p.columns * p.stride_c,
          p.stride_c};
}

// Return the weight of a visible keypoint if `visible` of its target's keypoints are visible.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_keypoint_share(const V8KeypointProblem& p, int visible) {
  return T(p.keypoints) / (T(visible) + T(1e-9));
}

// Return a keypoint's position along an axis, in cells. `cell` is the column or row of the anchor.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_keypoint_place(const V8KeypointProblem& p, T x, T cell) {
  return p.centered ? x + (cell + T(0.5)) : x * T(2) + cell;
}

// Return 1 - exp(-e) of a keypoint, and its gradient with respect to the two predicted numbers, `x` and `y`.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_keypoint_distance(const V8KeypointProblem& p, const V8KeypointSlot<T>& slot,
                                                 int keypoint, T x, T y, T (&gradient)[2]) {
  const float* label = v8_keypoint_label(p, slot.row, keypoint);
  const T dx = v8_keypoint_place(p, x, slot.x) - T(label[0]) * slot.by_image_w;
  const T dy = v8_keypoint_place(p, y, slot.y) - T(label[1]) * slot.by_image_h;
  const T sigma = T(2) * T(p.sigmas[keypoint]);
  const T spread = sigma * sigma * (slot.area + T(1e-9)) * T(2);
  const T nearness = exp_rn(-((dx * dx + dy * dy) / spread));
  const T by_logit = p.centered ? T(2) : T(4);
  gradient[0] = nearness * (by_logit * dx / spread);
  gradient[1] = nearness * (by_logit * dy / spread);
  return T(1) - nearness;
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE void v8_keypoint_finish(const V8KeypointLossParams& params, const double* sums,
                                                  double positives) {
  const V8KeypointProblem& p = params.problem;
  const double all = static_cast<double>(p.heads.bs) * params.settings[kV8Weight];
  for (int part = 0; part < 2; ++part) {
    const double gain = positives > 0 ? params.gains[part] / (positives * p.keypoints) : 0;
    static_cast<T*>(params.items)[part] = static_cast<T>(sums[part] * gain);
    static_cast<T*>(params.loss)[part] = static_cast<T>(sums[part] * gain * all);
    static_cast<T*>(params.scales)[part] = static_cast<T>(gain * all);
  }
}

// Write the gradients of keypoint k of a slot, scaled by `by_distance` and `by_visibility`.
template <typename scalar_t, typename T = arithmetic_t<scalar_t>>
TORCH_FASTDET_HOST_DEVICE void v8_keypoint_gradient(const V8KeypointLossBackwardParams& params,
                                                    const V8KeypointSlot<T>& slot, int k, T by_distance,
                                                    T by_visibility) {
  const V8KeypointProblem& p = params.problem;
  const T visible = T(v8_keypoint_visible(p, slot.row, k) ? 1 : 0);
  const auto logits = keypoint_logits<scalar_t>(p, slot.image, slot.anchor, k);
  T gradient[2];
  v8_keypoint_distance(p, slot, k, logits(0), logits(1), gradient);
  auto* out = static_cast<scalar_t*>(params.gradient) + slot.image * params.gradient_b +
              slot.anchor * params.gradient_a + k * p.columns * params.gradient_c;
  out[0] = from_arithmetic<scalar_t>(gradient[0] * (by_distance * visible));
  out[params.gradient_c] = from_arithmetic<scalar_t>(gradient[1] * (by_distance * visible));
  if (p.columns == 3) {
    out[2 * params.gradient_c] = from_arithmetic<scalar_t>((sigmoid(logits(2)) - visible) * by_visibility);
  }
}

cudaError_t launch_v8_keypoint_loss(const V8KeypointLossParams& params, cudaStream_t stream);
cudaError_t launch_v8_keypoint_loss_backward(const V8KeypointLossBackwardParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
