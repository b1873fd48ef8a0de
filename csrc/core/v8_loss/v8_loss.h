// The v8 detection loss has a task-aligned assignment, CIoU, distribution focal loss (or L1) and class entropy. Nothing
// takes images x targets x anchors of memory: each target walks over the anchors inside it and keeps the best topk in
// slots of its own. Of all slots that name an anchor, the one with the greatest number represents it, so that the order
// of sums does not depend on timing.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/v8_loss/v8_heads.h"
#include "core/v8_loss/v8_loss_math.h"

namespace torch_fastdet::core {

constexpr int kV8StatusSize = 4;
constexpr int64_t kV8FirstFault = int64_t{1} << 62;

// The forward pass leaves these for the backward pass. T is the arithmetic type of the heads' dtype.
struct V8Slots {
  int64_t* anchor;  // (n, topk) image * anchors + anchor, or -1 for an empty slot
  int64_t* row;     // (n, topk) row of the target that got the anchor, or -1
  void* score;      // (n, topk) T, the target score, or 0
  void* scales;     // (3) T, d(loss) / d(sum of the box, class and distance terms)
};

// The forward pass uses this scratch memory. Valid targets are renumbered by image, in the order of their rows.
struct V8Scratch {
  void* boxes;        // (bs, anchors, 4) T, predicted corners in pixels
  uint32_t* owner;    // (bs, anchors) 0, or 1 + the greatest slot that names the anchor, with kV8Shared if several do
  V8Target* targets;  // (n)
  int64_t* first_target;  // (bs + 1) first target of each image
  uint64_t* best;         // (n, 2) v8_order of the greatest alignment and overlap among a target's anchors
  void* alignment;        // (n, topk) T
  void* overlap;          // (n, topk) T
  int32_t* winner;        // (n, topk) renumbered target that got the slot's anchor
  void* slot_partials;    // (slot blocks, 4) T: scores, box, class and distance terms
  void* class_partials;   // (class blocks) T
};

struct V8LossParams {
  V8Heads heads;
  const float* targets;  // (n, 6) contiguous: image, class, x, y, w, h
  int64_t n;
  const int64_t* num_targets;  // device scalar: number of valid rows, the rest is padding; null: all
  const double* settings;      // (kV8Settings)
  const void* class_weights;   // (nc) T; null: 1
  int32_t topk, topk2;         // anchors that a target may name, and keep
  V8Slots slots;
  V8Scratch scratch;
  void* loss;   // (3) T: box, class, distance
  void* items;  // (3) T
  // Rows ignored; kV8FirstFault - (6 * row + column) of the first; num_targets less rows outside of it, else 0; unused.
  int64_t* status;
};

struct V8LossBackwardParams {
  V8Heads heads;
  const float* targets;
  int64_t n;
  const void* class_weights;
  int32_t topk;
  V8Slots slots;
  const void* grad_loss;  // (3) T by the stride below
  int64_t grad_stride;
};

constexpr uint32_t kV8Shared = uint32_t{1} << 31;

// The assignment asks these questions about targets and boxes. v8_obb_loss.h answers them for oriented boxes.

TORCH_FASTDET_HOST_DEVICE const float* v8_row(const V8LossParams& params, int64_t row) {
  return params.targets + 6 * row;
}

TORCH_FASTDET_HOST_DEVICE bool v8_read_target(const V8LossParams& params, const float* row, V8Sides sides,
                                              V8Target& target) {
  return v8_target(row, params.heads.image_w, params.heads.image_h, sides, params.heads.nc, target);
}

TORCH_FASTDET_HOST_DEVICE bool v8_holds(const V8LossParams&, const V8Target& target, float x, float y) {
  return v8_inside(target, x, y);
}

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE arithmetic_t<scalar_t> v8_overlap_of(const V8LossParams&, const V8Target& target,
                                                               const CornerBox<arithmetic_t<scalar_t>>& box, int64_t) {
  return v8_overlap(target, box);
}

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE CornerBox<arithmetic_t<scalar_t>> v8_place_box(const V8LossParams&, int64_t, int64_t,
                                                                         int64_t column, int64_t row,
                                                                         arithmetic_t<scalar_t> stride,
                                                                         const arithmetic_t<scalar_t> (&distance)[4]) {
  using T = arithmetic_t<scalar_t>;
  const T x = T(column) + T(0.5), y = T(row) + T(0.5);
  return {(x - distance[0]) * stride, (y - distance[1]) * stride, (x + distance[2]) * stride,
          (y + distance[3]) * stride};
}

template <typename Params>
TORCH_FASTDET_HOST_DEVICE bool v8_anchor_inside(const Params& params, const V8Target& target, const V8Anchor& at) {
  if ((target.levels >> at.level & 1u) == 0) return false;
  const float stride = params.heads.levels[at.level].stride;
  return v8_holds(params, target, v8_center(at.column, stride), v8_center(at.row, stride));
}

// Return the rank of an anchor among those inside a target, or 0 if it does not fit.
template <typename scalar_t, typename Params>
TORCH_FASTDET_HOST_DEVICE uint64_t v8_anchor_key(const Params& params, const V8Target& target, const V8Anchor& at) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const int64_t anchor = heads.levels[at.level].first + at.index;
  const T beta = static_cast<T>(params.settings[kV8Beta]);
  const T overlap = v8_overlap_of<scalar_t>(
      params, target, static_cast<const CornerBox<T>*>(params.scratch.boxes)[target.image * heads.anchors + anchor],
      anchor);
  if (overlap == T(0) && beta > T(0)) return 0;
  return v8_key(v8_alignment(class_logit<scalar_t>(heads, target.image, at, target.lookup), overlap,
                             static_cast<T>(params.settings[kV8Alpha]), beta),
                anchor);
}

// Return the key of the greatest overlap of targets first, first + step, ... with the anchor; the lowest wins ties.
template <typename scalar_t, typename Params>
TORCH_FASTDET_HOST_DEVICE uint64_t v8_best_target(const Params& params, int64_t anchor, int first, int step) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const V8Scratch& scratch = params.scratch;
  const int64_t image = anchor / heads.anchors;
  const V8Anchor at = v8_anchor(heads, anchor % heads.anchors);
  const CornerBox<T> box = static_cast<const CornerBox<T>*>(scratch.boxes)[anchor];
  uint64_t best = 0;
  for (int64_t i = scratch.first_target[image] + first; i < scratch.first_target[image + 1]; i += step) {
    const V8Target& target = scratch.targets[i];
    if (!v8_anchor_inside(params, target, at)) continue;
    const uint64_t key = v8_key(v8_overlap_of<scalar_t>(params, target, box, anchor % heads.anchors), i);
    best = key > best ? key : best;
  }
  return best;
}

// Give a slot's anchor to its target or, if `shared`, to that of `best`; if 0, without weight, to its image's first.
template <typename scalar_t, typename Params>
TORCH_FASTDET_HOST_DEVICE void v8_settle(const Params& params, int64_t slot, bool shared, uint64_t best) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const V8Scratch& scratch = params.scratch;
  const int64_t anchor = params.slots.anchor[slot], image = anchor / heads.anchors;
  const bool fits = !shared || best != 0;
  const int64_t winner = !shared ? slot / params.topk : fits ? v8_key_index(best) : scratch.first_target[image];
  const V8Target& target = scratch.targets[winner];
  T overlap = 0, alignment = 0;
  if (fits) {
    overlap = v8_overlap_of<scalar_t>(params, target, static_cast<const CornerBox<T>*>(scratch.boxes)[anchor],
                                      anchor % heads.anchors);
    alignment =
        v8_alignment(class_logit<scalar_t>(heads, image, v8_anchor(heads, anchor % heads.anchors), target.lookup),
                     overlap, static_cast<T>(params.settings[kV8Alpha]), static_cast<T>(params.settings[kV8Beta]));
  }
  scratch.winner[slot] = static_cast<int32_t>(winner);
  static_cast<T*>(scratch.overlap)[slot] = overlap;
  static_cast<T*>(scratch.alignment)[slot] = alignment;
}

// Set loss, items and scales from the sum of scores and the sums of each part's terms.
template <typename T, int kParts>
TORCH_FASTDET_HOST_DEVICE void v8_finish(const V8LossParams& params, double score_sum, const double (&sums)[kParts]) {
  const double scores = score_sum < 1 ? 1 : score_sum;  // NaN stays
  const double all = static_cast<double>(params.heads.bs) * params.settings[kV8Weight];
  for (int part = 0; part < kParts; ++part) {
    const double gain = params.settings[part < 3 ? kV8Box + part : kV8Settings] / scores;  // the angle's is last
    static_cast<T*>(params.items)[part] = static_cast<T>(sums[part] * gain);
    static_cast<T*>(params.loss)[part] = static_cast<T>(sums[part] * gain * all);
    static_cast<T*>(params.slots.scales)[part] = static_cast<T>(gain * all);
  }
}

// Write the gradients of one side of an anchor's box: `by_distance` is the box part's, `scale` the distance part's.
template <typename scalar_t, typename T = arithmetic_t<scalar_t>>
TORCH_FASTDET_HOST_DEVICE void v8_write_side(const V8Heads& heads, int64_t image, const V8Anchor& at, int side,
                                             const V8Side<T>& predicted, T wanted, T by_distance, T scale) {
  const V8Level& level = heads.levels[at.level];
  const V8Tensor& boxes = heads.tensors[level.boxes];
  const auto logits = side_logits<scalar_t>(heads, image, at, side);
  const T share = cell_share<T>(heads, at, side);
  const int64_t step = v8_gradient_step(boxes);
  scalar_t* out = static_cast<scalar_t*>(boxes.gradient) +
                  v8_gradient(boxes, image, side * heads.reg_max, level.first_in_tensor + at.index);
  for (int i = 0; i < heads.reg_max; ++i) {
    out[i * step] = from_arithmetic<scalar_t>(
        v8_side_gradient(predicted, wanted, share, heads.reg_max, logits, i, by_distance, scale));
  }
}

template <typename scalar_t, typename T = arithmetic_t<scalar_t>>
TORCH_FASTDET_HOST_DEVICE void v8_write_class(const V8LossBackwardParams& params, int64_t image, const V8Anchor& at,
                                              int label, T score, T scale) {
  const V8Level& level = params.heads.levels[at.level];
  const V8Tensor& classes = params.heads.tensors[level.classes];
  const T logit = class_logit<scalar_t>(params.heads, image, at, label);
  const int64_t place = v8_gradient(classes, image, classes.box_channels + label, level.first_in_tensor + at.index);
  static_cast<scalar_t*>(classes.gradient)[place] =
      from_arithmetic<scalar_t>((sigmoid(logit) - score) * scale * class_weight<T>(params.class_weights, label));
}

int64_t v8_slot_blocks(const V8LossParams& params);
int64_t v8_class_blocks(const V8LossParams& params);
cudaError_t launch_v8_loss(const V8LossParams& params, cudaStream_t stream);
cudaError_t launch_v8_loss_backward(const V8LossBackwardParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
