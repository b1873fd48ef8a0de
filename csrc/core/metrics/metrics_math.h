// Compute intersection over union as the validators of YOLOv5 and Ultralytics round it, and access the rows for it.
#pragma once

#include <cstdint>

#include "core/common/exact_math.h"
#include "core/metrics/metrics.h"

namespace torch_fastdet::core {

// Return the row of one detection: x1, y1, x2, y2, confidence, class.
TORCH_FASTDET_HOST_DEVICE const float* detection_row(const MatchInput& in, int64_t image, int64_t index) {
  return in.detections + image * in.image_stride + index * in.row_stride;
}

// Return the row of one label: class, x1, y1, x2, y2.
TORCH_FASTDET_HOST_DEVICE const float* label_row(const MatchInput& in, int64_t index) {
  return in.labels + index * in.label_stride + (in.labels_name_image ? 1 : 0);
}

TORCH_FASTDET_HOST_DEVICE bool label_is_of(const MatchInput& in, int64_t image, int64_t index) {
  return !in.labels_name_image || in.labels[index * in.label_stride] == static_cast<float>(image);
}

TORCH_FASTDET_HOST_DEVICE int64_t detections_of(const MatchInput& in, int64_t image) {
  if (in.counts == nullptr) return in.count;
  const int64_t count = in.counts[image];
  return count < 0 ? 0 : (count < in.count ? count : in.count);
}

// Round every operation separately, as box_iou on tensors does, so that comparisons with a threshold agree.
TORCH_FASTDET_HOST_DEVICE float box_iou(const float* a, const float* b) {
  const float left = a[0] > b[0] ? a[0] : b[0], right = a[2] < b[2] ? a[2] : b[2];
  const float top = a[1] > b[1] ? a[1] : b[1], bottom = a[3] < b[3] ? a[3] : b[3];
  const float width = right - left > 0.f ? sub_rn(right, left) : 0.f;
  const float height = bottom - top > 0.f ? sub_rn(bottom, top) : 0.f;
  const float common = mul_rn(width, height);
  const float area_a = mul_rn(sub_rn(a[2], a[0]), sub_rn(a[3], a[1]));
  const float area_b = mul_rn(sub_rn(b[2], b[0]), sub_rn(b[3], b[1]));
  return div_rn(common, add_rn(sub_rn(add_rn(area_a, area_b), common), 1e-7f));
}

TORCH_FASTDET_HOST_DEVICE float overlap(const MatchInput& in, int64_t image, int64_t label, int64_t index) {
  return in.iou == nullptr ? box_iou(label_row(in, label) + 1, detection_row(in, image, index))
                           : in.iou[label * in.count + index];
}

// Return the label that a detection claims under MatchRule::kBest: the greatest IoU, the later label if they are equal.
// With same_class, consider only labels of the detection's class. Return -1 if no label has a positive IoU.
TORCH_FASTDET_HOST_DEVICE int64_t best_label(const MatchInput& in, int64_t image, int64_t index, bool same_class,
                                             float* iou) {
  const float category = detection_row(in, image, index)[5];
  int64_t best = -1;
  float greatest = 0.f;
  for (int64_t l = 0; l < in.label_count; ++l) {
    if (!label_is_of(in, image, l)) continue;
    if (same_class && label_row(in, l)[0] != category) continue;
    const float value = overlap(in, image, l, index);
    if (value > 0.f && value >= greatest) greatest = value, best = l;
  }
  *iou = greatest;
  return best;
}

// Return the index of a class in a confusion matrix of `classes` classes and the background, or -1 if it has none.
TORCH_FASTDET_HOST_DEVICE int64_t matrix_class(float value, int64_t classes) {
  // The original function converts to int, which drops the fraction.
  return value > -1.f && value < static_cast<float>(classes + 1) ? static_cast<int64_t>(value) : -1;
}

}  // namespace torch_fastdet::core
