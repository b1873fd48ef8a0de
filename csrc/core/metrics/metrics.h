// Match detections with labels for validation: correct detections by IoU threshold, and the confusion matrix.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"

namespace torch_fastdet::core {

// Choose a label's detection among those with enough IoU (in match_detections, also of the label's class).
enum class MatchRule : int32_t {
  kBest,    // YOLOv5: a detection claims only the label with which its IoU is greatest
  kGreedy,  // Ultralytics: in row order, a detection takes the best free label
};

// Strides are in elements, and every row is dense. Coordinates are float32.
struct MatchInput {
  const float* detections = nullptr;  // (images, count, 6 or more): x1, y1, x2, y2, confidence, class
  int64_t images = 0, count = 0, image_stride = 0, row_stride = 0;
  const int64_t* counts = nullptr;  // (images) valid rows; nullptr: all
  const float* labels = nullptr;    // (label_count, 5): class, x1, y1, x2, y2; or 6 with the image first
  int64_t label_count = 0, label_stride = 0;
  bool labels_name_image = false;
  const float* iou = nullptr;  // (label_count, count): with the detections of the label's image; nullptr: of the boxes
  MatchRule rule = MatchRule::kBest;
};

struct MatchParams {
  MatchInput in;
  const float* thresholds = nullptr;  // (threshold_count)
  int64_t threshold_count = 0;
  bool* correct = nullptr;    // (images, count, threshold_count)
  int32_t* claims = nullptr;  // workspace (label_count, threshold_count)
  int32_t* best = nullptr;    // workspace (images, count), for kBest
};

struct ConfusionParams {
  MatchInput in;
  float confidence = 0, iou_threshold = 0;
  int64_t classes = 0;
  int64_t* matrix = nullptr;   // (classes + 1, classes + 1), [predicted, true], accumulated
  uint64_t* claims = nullptr;  // workspace (label_count): the matched detection; 0: none
  int32_t* matched = nullptr;  // workspace (images, count): whether a detection is matched
};

// Queue one launch on `stream`. The workspace may be uninitialized.
cudaError_t launch_match(const MatchParams& params, cudaStream_t stream);
cudaError_t launch_confusion(const ConfusionParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
