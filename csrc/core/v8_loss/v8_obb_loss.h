// The loss of oriented boxes is the detection loss with rotated boxes. It shares the assignment except for the
// questions below; the terms and gradients of an anchor are here, for both CPU and CUDA.
#pragma once

#include "core/v8_loss/v8_loss.h"
#include "core/v8_loss/v8_obb_math.h"

namespace torch_fastdet::core {

constexpr int kV8ObbColumns = 7;                 // of a target: image, class, x, y, w, h, angle
constexpr int kV8ObbTerms = 5;                   // sums over slots: scores, box, class, distance, angle
constexpr int kV8ObbParts = 4;                   // of the loss: box, class, distance, angle
constexpr int kV8ObbSettings = kV8Settings + 1;  // the angle's gain comes after the other settings

// Describe the angles (bs, 1, anchors), in radians.
struct V8Angles {
  const void* at;
  int64_t stride_b, stride_a;
  void* gradient;
  int64_t gradient_b, gradient_a;
};

// Targets have seven columns, settings ten numbers; loss, items and scales hold four, rows of slot_partials five.
struct V8ObbLossParams : V8LossParams {
  V8Angles angles;
};

struct V8ObbLossBackwardParams : V8LossBackwardParams {
  V8Angles angles;
};

// ---- What the assignment asks --------------------------------------------------------------------------------------

TORCH_FASTDET_HOST_DEVICE const float* v8_row(const V8ObbLossParams& params, int64_t row) {
  return params.targets + kV8ObbColumns * row;
}

TORCH_FASTDET_HOST_DEVICE bool v8_read_target(const V8ObbLossParams& params, const float* row, V8Sides sides,
                                              V8Target& target) {
  return v8_obb_target(row, params.heads.image_w, params.heads.image_h, sides, params.heads.nc, target);
}

TORCH_FASTDET_HOST_DEVICE bool v8_holds(const V8ObbLossParams& params, const V8Target& target, float x, float y) {
  return v8_obb_inside(target, v8_row(params, target.row)[6], v8_sides(params.settings), x, y);
}

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE arithmetic_t<scalar_t> v8_angle(const V8Angles& angles, int64_t image, int64_t anchor) {
  return to_arithmetic(static_cast<const scalar_t*>(angles.at)[image * angles.stride_b + anchor * angles.stride_a]);
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE V8Obb<T> v8_obb_of(const V8Target& target, float angle) {
  return {T(target.x1), T(target.y1), T(target.x2), T(target.y2), T(angle)};
}

// `box` holds center, width and height in pixels.
template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE arithmetic_t<scalar_t> v8_overlap_of(const V8ObbLossParams& params, const V8Target& target,
                                                               const CornerBox<arithmetic_t<scalar_t>>& box,
                                                               int64_t anchor) {
  using T = arithmetic_t<scalar_t>;
  const V8Obb<T> wanted = v8_obb_of<T>(target, v8_row(params, target.row)[6]);
  const V8Obb<T> predicted{box.x1, box.y1, box.x2, box.y2, v8_angle<scalar_t>(params.angles, target.image, anchor)};
  const T overlap = v8_probiou(wanted, v8_gaussian(wanted, T(0)), predicted, v8_gaussian(predicted, T(0))).value;
  return overlap < T(0) ? T(0) : overlap;
}

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE CornerBox<arithmetic_t<scalar_t>> v8_place_box(const V8ObbLossParams& params, int64_t image,
                                                                         int64_t anchor, int64_t column, int64_t row,
                                                                         arithmetic_t<scalar_t> stride,
                                                                         const arithmetic_t<scalar_t> (&distance)[4]) {
  const auto box = decode_rotated(distance, v8_angle<scalar_t>(params.angles, image, anchor), column, row, stride);
  return {box.x, box.y, box.width, box.height};
}

// ---- An anchor in a slot -------------------------------------------------------------------------------------------

// All values are in cells of the anchor's level.
template <typename scalar_t>
struct V8ObbPair {
  using T = arithmetic_t<scalar_t>;
  V8Anchor at;
  int64_t image, anchor;
  V8Side<T> sides[4];
  T distance[4];
  T wanted_distance[4];
  V8Obb<T> box, wanted;
  T along, across;  // vector from the anchor to the predicted center, along the box's axes
};

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE V8ObbPair<scalar_t> v8_obb_pair(const V8Heads& heads, const V8Angles& angles, int64_t anchor,
                                                          const V8Target& target, float angle) {
  using T = arithmetic_t<scalar_t>;
  V8ObbPair<scalar_t> pair;
  pair.image = anchor / heads.anchors;
  pair.anchor = anchor % heads.anchors;
  pair.at = v8_anchor(heads, pair.anchor);
  const T stride = heads.levels[pair.at.level].stride;
  for (int side = 0; side < 4; ++side) {
    pair.sides[side] = v8_side<T>(heads.reg_max, side_logits<scalar_t>(heads, pair.image, pair.at, side));
    pair.distance[side] = pair.sides[side].distance;
  }
  const T predicted_angle = v8_angle<scalar_t>(angles, pair.image, pair.anchor);
  const auto box = decode_rotated(pair.distance, predicted_angle, pair.at.column, pair.at.row, T(1));
  pair.box = {box.x, box.y, box.width, box.height, predicted_angle};
  pair.along = (pair.distance[2] - pair.distance[0]) / T(2);
  pair.across = (pair.distance[3] - pair.distance[1]) / T(2);
  pair.wanted = {T(target.x1) / stride, T(target.y1) / stride, T(target.x2) / stride, T(target.y2) / stride, T(angle)};
  // Transform the anchor to the target's own frame.
  const Direction<T> d = direction_of(pair.wanted.angle);
  const T dx = T(pair.at.column) + T(0.5) - pair.wanted.x, dy = T(pair.at.row) + T(0.5) - pair.wanted.y;
  const T u = dx * d.cosine + dy * d.sine, v = dy * d.cosine - dx * d.sine;
  pair.wanted_distance[0] = pair.wanted.w / T(2) + u;
  pair.wanted_distance[1] = pair.wanted.h / T(2) + v;
  pair.wanted_distance[2] = pair.wanted.w / T(2) - u;
  pair.wanted_distance[3] = pair.wanted.h / T(2) - v;
  return pair;
}

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE void v8_obb_terms(const V8ObbLossParams& params, int64_t slot,
                                            arithmetic_t<scalar_t> (&terms)[kV8ObbTerms]) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  T* scores = static_cast<T*>(params.slots.score);
  int64_t anchor = params.slots.anchor[slot];
  if (anchor >= 0 && params.topk2 != params.topk && scores[slot] == T(0)) {  // the filter dropped it
    params.slots.anchor[slot] = anchor = -1;
  }
  for (T& term : terms) term = T(0);
  params.slots.row[slot] = -1;
  scores[slot] = T(0);
  if (anchor < 0) return;
  const int32_t winner = params.scratch.winner[slot];
  const V8Target target = params.scratch.targets[winner];
  const auto pair = v8_obb_pair<scalar_t>(heads, params.angles, anchor, target, v8_row(params, target.row)[6]);
  const T score = v8_score(static_cast<const T*>(params.scratch.alignment)[slot], params.scratch.best[2 * winner],
                           params.scratch.best[2 * winner + 1], static_cast<T>(params.settings[kV8Eps]));
  params.slots.row[slot] = target.row;
  scores[slot] = score;
  const auto predicted = v8_gaussian(pair.box, T(kV8ObbFloor)), wanted = v8_gaussian(pair.wanted, T(kV8ObbFloor));
  T distance = 0, by_angle;
  for (int side = 0; side < 4; ++side) {
    distance += v8_distance_term(pair.sides[side], pair.wanted_distance[side], cell_share<T>(heads, pair.at, side),
                                 heads.reg_max, side_logits<scalar_t>(heads, pair.image, pair.at, side));
  }
  terms[0] = score;
  terms[1] = score * (T(1) - v8_probiou(pair.box, predicted, pair.wanted, wanted).value);
  terms[2] = -score * class_weight<T>(params.class_weights, target.label) *
             class_logit<scalar_t>(heads, pair.image, pair.at, target.label);
  terms[3] = score * distance;
  terms[4] = score * v8_angle_term(pair.wanted.w, pair.wanted.h, pair.box.angle - pair.wanted.angle, by_angle);
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE void v8_obb_finish(const V8ObbLossParams& params, const double (&sums)[kV8ObbTerms]) {
  const double raw[kV8ObbParts] = {sums[1], sums[2], sums[3], sums[4]};
  v8_finish<T>(params, sums[0], raw);
}

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE void v8_obb_gradient(const V8ObbLossBackwardParams& params, int64_t slot) {
  using T = arithmetic_t<scalar_t>;
  const int64_t anchor = params.slots.anchor[slot];
  if (anchor < 0) return;
  const V8Heads& heads = params.heads;
  T by_part[kV8ObbParts];
  for (int part = 0; part < kV8ObbParts; ++part) {
    by_part[part] = static_cast<const T*>(params.grad_loss)[part * params.grad_stride] *
                    static_cast<const T*>(params.slots.scales)[part];
  }
  const float* row = params.targets + kV8ObbColumns * params.slots.row[slot];
  V8Target target;
  v8_obb_target(row, heads.image_w, heads.image_h, {}, heads.nc, target);
  const auto pair = v8_obb_pair<scalar_t>(heads, params.angles, anchor, target, row[6]);
  const T score = static_cast<const T*>(params.slots.score)[slot];
  const auto predicted = v8_gaussian(pair.box, T(kV8ObbFloor)), wanted = v8_gaussian(pair.wanted, T(kV8ObbFloor));
  V8Obb<T> by{};
  v8_probiou_gradient(v8_probiou(pair.box, predicted, pair.wanted, wanted), pair.box, predicted, wanted,
                      -score * by_part[0], by);
  T by_angle;
  v8_angle_term(pair.wanted.w, pair.wanted.h, pair.box.angle - pair.wanted.angle, by_angle);
  const Direction<T> d = direction_of(pair.box.angle);
  const T along = (by.x * d.cosine + by.y * d.sine) / T(2), across = (by.y * d.cosine - by.x * d.sine) / T(2);
  const T turn =
      by.y * (pair.along * d.cosine - pair.across * d.sine) - by.x * (pair.along * d.sine + pair.across * d.cosine);
  const T by_side[4] = {by.w - along, by.h - across, by.w + along, by.h + across};
  for (int side = 0; side < 4; ++side) {
    v8_write_side<scalar_t>(heads, pair.image, pair.at, side, pair.sides[side], pair.wanted_distance[side],
                            by_side[side], score * by_part[2]);
  }
  v8_write_class<scalar_t>(params, pair.image, pair.at, target.label, score, by_part[1]);
  static_cast<scalar_t*>(
      params.angles.gradient)[pair.image * params.angles.gradient_b + pair.anchor * params.angles.gradient_a] =
      from_arithmetic<scalar_t>(by.angle + turn + score * by_part[3] * by_angle);
}

int64_t v8_obb_slot_blocks(const V8ObbLossParams& params);
cudaError_t launch_v8_obb_loss(const V8ObbLossParams& params, cudaStream_t stream);
cudaError_t launch_v8_obb_loss_backward(const V8ObbLossBackwardParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
