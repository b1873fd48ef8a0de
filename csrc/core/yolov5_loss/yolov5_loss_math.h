// Compute the YOLOv5 training loss one candidate or one logit at a time, for CPU and CUDA.
#pragma once

#include <math.h>

#include <cstdint>

#include "core/boxes/box_math.h"
#include "core/common/host_device.h"
#include "core/common/yolo_math.h"

namespace torch_fastdet::core {

// A target may match its own cell and those that its centre leans to, in the order centre, left, up, right, down.
constexpr int kYolov5CellOffsets = 5;

struct Yolov5Match {
  bool matched;
  int64_t x, y;                      // cell, inside the grid
  float box_x, box_y, box_w, box_h;  // target in grid units, centre relative to the cell's corner
};

// Return the cell that contains a coordinate in grid units, or the nearest cell if it is outside the grid.
TORCH_FASTDET_HOST_DEVICE int64_t clamped_cell(float position, int64_t cells) {
  if (!(position > 0.0f)) return 0;
  return position >= static_cast<float>(cells) ? cells - 1 : static_cast<int64_t>(position);
}

// `box` is normalised x, y, w, h; `offset` is as above. It rounds as eager: an fma would move targets on grid lines.
TORCH_FASTDET_HOST_DEVICE Yolov5Match yolov5_match(const float box[4], const float anchor[2], int64_t nx, int64_t ny,
                                                   float anchor_t, int offset) {
  Yolov5Match match{};
  const float grid_w = static_cast<float>(nx), grid_h = static_cast<float>(ny);
  const float w = mul_rn(box[2], grid_w), h = mul_rn(box[3], grid_h);
  const float ratio_w = div_rn(w, anchor[0]), ratio_h = div_rn(h, anchor[1]);
  // Compare each ratio separately, so that NaN fails; fmaxf would ignore it.
  if (!(ratio_w < anchor_t && div_rn(1.0f, ratio_w) < anchor_t)) return match;
  if (!(ratio_h < anchor_t && div_rn(1.0f, ratio_h) < anchor_t)) return match;

  const float x = mul_rn(box[0], grid_w), y = mul_rn(box[1], grid_h);
  const float mirrored_x = sub_rn(grid_w, x), mirrored_y = sub_rn(grid_h, y);
  float shift_x = 0.0f, shift_y = 0.0f;
  float position = 2.0f;  // of the coordinate that decides; this default makes the centre match
  switch (offset) {
    case 1:
      position = x;
      shift_x = 0.5f;
      break;
    case 2:
      position = y;
      shift_y = 0.5f;
      break;
    case 3:
      position = mirrored_x;
      shift_x = -0.5f;
      break;
    case 4:
      position = mirrored_y;
      shift_y = -0.5f;
      break;
    default:
      break;
  }
  // At exactly 1 there is no neighbour; on a grid line (fraction 0) both neighbours of the line qualify.
  if (!(position > 1.0f && position - floorf(position) < 0.5f)) return match;

  match.matched = true;
  match.x = clamped_cell(sub_rn(x, shift_x), nx);
  match.y = clamped_cell(sub_rn(y, shift_y), ny);
  // The centre is relative to the clamped cell, so a target at the far edge has offset 1.
  match.box_x = sub_rn(x, static_cast<float>(match.x));
  match.box_y = sub_rn(y, static_cast<float>(match.y));
  match.box_w = w;
  match.box_h = h;
  return match;
}

// Return a row's bad column + 1, or 0. Indices are truncated as in eager; boxes may lie outside the image.
TORCH_FASTDET_HOST_DEVICE int yolov5_target_fault(const float row[6], int64_t batch_size, int64_t classes) {
  if (!(row[0] > -1.0f && row[0] < static_cast<float>(batch_size))) return 1;
  if (!(row[1] > -1.0f && row[1] < static_cast<float>(classes))) return 2;
  for (int column = 2; column < 6; ++column) {
    if (!is_finite(row[column])) return column + 1;
  }
  return 0;
}

template <typename T>
struct ValueAndGradient {
  T value, gradient;
};

// Compute the binary cross entropy of one logit. positive_weight multiplies the positive term. gamma > 0 adds the focal
// factor alpha_t (1 - p_t)^gamma with alpha = 0.25, and the gradient includes the factor's. `target` may be soft.
template <typename T>
TORCH_FASTDET_HOST_DEVICE ValueAndGradient<T> binary_cross_entropy(T logit, T target, T positive_weight, T gamma) {
  const T decay = exp_rn(-fabs(logit));
  const T inverse = T(1) / (T(1) + decay);
  const T probability = logit >= 0 ? inverse : decay * inverse;
  const T complement = logit >= 0 ? decay * inverse : inverse;
  const T weight = T(1) + (positive_weight - T(1)) * target;
  const T softplus = log1p(decay) + (logit < 0 ? -logit : T(0));  // -log(probability)
  ValueAndGradient<T> entropy{(T(1) - target) * logit + weight * softplus, (T(1) - target) - weight * complement};
  if (gamma > 0) {
    const T miss = target * complement + (T(1) - target) * probability;  // 1 - p_t
    const T alpha = target * T(0.25) + (T(1) - target) * T(0.75);
    const T power = pow(miss, gamma);
    const T miss_gradient = (T(1) - T(2) * target) * probability * complement;
    // If the miss is 0, so is its slope; the quotient would be 0 / 0.
    const T power_gradient = miss > 0 ? gamma * (power / miss) * miss_gradient : T(0);
    entropy.gradient = alpha * (power * entropy.gradient + power_gradient * entropy.value);
    entropy.value *= alpha * power;
  }
  return entropy;
}

template <typename T>
struct Yolov5Box {
  T ciou;
  T gradient[4];  // d(1 - ciou) / d(logits)
};

// Decode a cell and compare it with the target. The centre is 2 sigmoid - 0.5, the sides are (2 sigmoid)^2 anchors.
template <typename T>
TORCH_FASTDET_HOST_DEVICE Yolov5Box<T> yolov5_box(const T logits[4], const Yolov5Match& match, const float anchor[2]) {
  const T x = sigmoid(logits[0]), y = sigmoid(logits[1]), w = sigmoid(logits[2]), h = sigmoid(logits[3]);
  const T box_w = T(4) * w * w * T(anchor[0]), box_h = T(4) * h * h * T(anchor[1]);
  const Box<T> predicted = box_from_xywh(T(2) * x - T(0.5), T(2) * y - T(0.5), box_w, box_h);
  const Box<T> wanted = box_from_xywh(T(match.box_x), T(match.box_y), T(match.box_w), T(match.box_h));
  Box<T> by_predicted, by_wanted;
  Yolov5Box<T> box;
  box.ciou = box_iou_grad<IouKind::kCiou>(predicted, wanted, T(1e-7), T(-1), by_predicted, by_wanted);
  T by_xywh[4];
  fold_box_grad(by_predicted, true, by_xywh);
  box.gradient[0] = by_xywh[0] * T(2) * x * (T(1) - x);
  box.gradient[1] = by_xywh[1] * T(2) * y * (T(1) - y);
  box.gradient[2] = by_xywh[2] * T(2) * box_w * (T(1) - w);
  box.gradient[3] = by_xywh[3] * T(2) * box_h * (T(1) - h);
  return box;
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE T yolov5_objectness_target(T ciou, T gr) {
  const T positive = ciou < T(0) ? T(0) : ciou;
  return gr < T(1) ? (T(1) - gr) + gr * positive : positive;
}

}  // namespace torch_fastdet::core
