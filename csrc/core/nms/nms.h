// Compute padded, exact non-maximum suppression of a prediction tensor or of raw head maps.
//
// A candidate is an (anchor, class) pair whose confidence passes. Its index is anchor * classes + class, so that ties
// are broken by box first and then by class. The max_candidates best candidates of an image, sorted by (confidence
// descending, index ascending), are kept greedily until max_detections are kept.
#pragma once

#include <cstdint>

#include "core/common/dtype.h"
#include "core/nms/nms_math.h"

namespace torch_fastdet::core {

constexpr int kMaxLevels = 6;
constexpr int kMaxAnchorsPerCell = 8;
constexpr int64_t kMaxFilteredClasses = 16384;

// A head level has strided maps with strides in elements.
struct HeadMap {
  const void* data = nullptr;
  int64_t image = 0, anchor = 0, channel = 0, row = 0, column = 0;
};

struct HeadLevel {
  HeadMap boxes;   // YOLOv5: all channels of the head. Anchor-free: the 4 * reg_max box channels
  HeadMap scores;  // anchor-free: the class channels
  HeadMap extra;   // anchor-free: mask coefficients, keypoints, ...; may be absent
  int64_t first_anchor = 0;
  int32_t rows = 0, columns = 0;
  double stride = 0;  // pixels per cell
};

enum class CandidateLayout : int32_t {
  kPrediction,      // decoded tensor: box center and size, [objectness,] classes, extra
  kAnchorHeads,     // raw YOLOv5 maps
  kAnchorFreeHeads  // raw Ultralytics maps
};

// Select how the extra columns of anchor-free heads are decoded.
enum class ExtraKind : int32_t {
  kRaw,            // unchanged
  kAngleLogit,     // the last one is the logit of an angle, (sigmoid - 1/4) pi
  kKeypoints,      // YOLOv8 and YOLO11: x, y (2 v + cell) strides from the corner, sigmoid of the visibility
  kCellKeypoints,  // YOLO26: x, y (v + center of the cell) strides from the corner
};

struct CandidateSource {
  CandidateLayout layout = CandidateLayout::kPrediction;
  DType dtype = DType::kFloat32;
  int64_t images = 0, anchors = 0, classes = 0, extra = 0;
  bool has_objectness = false;  // multiply extra columns and class scores by objectness

  // kPrediction uses these. Strides are in elements.
  const void* data = nullptr;
  int64_t image_stride = 0, anchor_stride = 0, channel_stride = 0;

  // The head layouts use these.
  int32_t levels = 0;
  int32_t anchors_per_cell = 1;
  int32_t bins = 1;  // reg_max of the anchor-free head
  HeadLevel level[kMaxLevels];
  // Anchor sides are in cells, [level][anchor][width, height]. They are on the device, or here if that pointer is null.
  const float* anchor_sides_device = nullptr;
  float anchor_sides[kMaxLevels * kMaxAnchorsPerCell * 2] = {};

  ExtraKind extra_kind = ExtraKind::kRaw;
  int32_t keypoint_values = 0;  // 2: x, y; 3: x, y, visibility

  // Valid rows [image, class, x, y, width, height] are extra candidates of confidence 1 (YOLOv5's autolabels).
  const float* labels = nullptr;
  int64_t label_count = 0;
};

// Select the rule by which rotated boxes suppress each other, using probiou. The last extra column is the angle.
enum class RotatedRule : int32_t {
  kNone,    // boxes are upright
  kFast,    // drop a box if any better one overlaps it, kept or not, as the original function does
  kGreedy,  // drop a box if a better one that is kept overlaps it
};

struct NmsOptions {
  // The thresholds are rounded to the stored type, and to the arithmetic type for images with labels.
  double confidence = 0.25, confidence_promoted = 0.25;
  double logit_floor = 0;  // logits at or below it cannot pass `confidence`
  double iou = 0.45;
  double max_wh = 7680;
  int64_t max_candidates = 30000, max_detections = 300;
  ClassRule class_rule = ClassRule::kOffset;
  RotatedRule rotated = RotatedRule::kNone;
  double reach_scale = 0;  // for rotated boxes: reach_scale_of() in rotated_math.h
  bool multi_label = false;
  // A NaN class score drops the anchor of an anchor-free prediction, but only that class for YOLOv5 (multi_label).
  bool nan_class_drops_anchor = false;
};

// Hold the classes that may be detected as bits. All may be detected if `active` is false.
struct ClassFilter {
  bool active = false;
  uint32_t bits[kMaxFilteredClasses / 32] = {};

  void add(int64_t number) { bits[number >> 5] |= 1u << (number & 31); }
  TORCH_FASTDET_HOST_DEVICE bool has(int64_t number) const { return (bits[number >> 5] >> (number & 31)) & 1u; }
};

// B is images, D is max_detections and E is extra columns. Rows and indices past the count are set to zero and -1.
struct NmsOutput {
  void* detections = nullptr;         // (B, D, 6 + E) float, or double for double
  int64_t* counts = nullptr;          // (B)
  int64_t* indices = nullptr;         // (B, D) anchor of each detection
  const void* letterboxes = nullptr;  // (B, 6) of the detections' type, to output original pixels; may be null
};

}  // namespace torch_fastdet::core
