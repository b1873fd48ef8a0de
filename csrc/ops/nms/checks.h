// Check the post-processing operators for CPU, CUDA and Meta, and make the plain structs that the core takes.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>

#include "core/nms/filter.h"
#include "core/nms/nms.h"
#include "core/nms/rotated_math.h"
#include "core/nms/scale_boxes.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

using core::CandidateLayout;
using core::CandidateSource;
using core::ClassFilter;
using core::ClassRule;
using core::NmsOptions;

// Hold the arguments with which every suppression operator begins, and those with which it ends.
struct NmsArguments {
  double conf_thres, iou_thres;
  at::OptionalIntArrayRef classes;
  bool agnostic, multi_label;
  int64_t max_det;
  using Types = std::tuple<double, double, at::OptionalIntArrayRef, bool, bool, int64_t>;
};

struct NmsLastArguments {
  const std::optional<at::Tensor>& letterboxes;
  std::string_view per_class;
  int64_t max_nms;
  double max_wh;
  using Types = std::tuple<const std::optional<at::Tensor>&, std::string_view, int64_t, double>;
};

// Hold the input of a launch, and converted tensors until the launch is queued.
struct NmsRequest {
  CandidateSource source;
  NmsOptions options;
  ClassFilter filter;
  at::Tensor labels, anchors, letterboxes;
};

using Detections = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

inline Detections empty_detections(const at::Tensor& input, const c10::SymInt& images, int64_t max_det,
                                   const c10::SymInt& extra) {
  const auto integer = input.options().dtype(at::kLong);
  return {at::empty_symint({images, max_det, extra + 6}, input.options().dtype(arithmetic_type(input))),
          at::empty_symint({images}, integer), at::empty_symint({images, max_det}, integer)};
}

inline core::NmsOutput detections_output(const Detections& detections) {
  core::NmsOutput output;
  output.detections = std::get<0>(detections).mutable_data_ptr();
  output.counts = std::get<1>(detections).mutable_data_ptr<int64_t>();
  output.indices = std::get<2>(detections).mutable_data_ptr<int64_t>();
  return output;
}

inline core::NmsOutput nms_output(const NmsRequest& request, const Detections& detections) {
  core::NmsOutput output = detections_output(detections);
  output.letterboxes = request.letterboxes.defined() ? request.letterboxes.const_data_ptr() : nullptr;
  return output;
}

inline std::tuple<at::Tensor, at::Tensor> without_indices(Detections&& detections) {
  return {std::get<0>(detections), std::get<1>(detections)};
}

inline double rounded_to(double value, at::ScalarType type) {
  const float single = static_cast<float>(value);
  if (type == at::kHalf) return static_cast<float>(static_cast<c10::Half>(single));
  if (type == at::kBFloat16) return static_cast<float>(static_cast<c10::BFloat16>(single));
  return type == at::kDouble ? value : single;
}

inline double to_arithmetic_type(double value, at::ScalarType type) {
  return type == at::kDouble ? value : static_cast<float>(value);
}

// Return a logit whose sigmoid cannot exceed `threshold`, even rounded up to bfloat16.
inline double logit_floor(double threshold) {
  const double lowest = threshold * (1 - 1. / 128);
  return std::log(lowest / (1 - lowest)) - 1e-3;
}

inline void check_letterboxes(const at::Tensor& letterboxes, const at::Tensor& input, const char* op,
                              const char* input_name) {
  const auto fits = [&] { return same_sizes(letterboxes, input, {0}).sym_and(letterboxes.sym_size(1).sym_eq(6)); };
  TORCH_SYM_CHECK(letterboxes.dim() == 2 ? fits() : c10::SymBool(false), op, ": letterboxes has shape ",
                  letterboxes.sym_sizes(), ", but (", input.sym_size(0),
                  ", 6) is expected: gain_x, gain_y, pad_x, pad_y, width, height of each image");
  check_float(letterboxes, op, "letterboxes");
  check_same_device(input, input_name, letterboxes, op, "letterboxes");
}

inline void check_confidence(double threshold, const char* op) {
  TORCH_CHECK_VALUE(threshold >= 0 && threshold <= 1, op, ": conf_thres is ", threshold,
                    ", but a confidence threshold between 0 and 1 is expected");
}

inline void check_most(int64_t max_det, const char* op) {
  TORCH_CHECK_VALUE(max_det >= 0, op, ": max_det is ", max_det, ", but 0 or more detections an image are expected");
}

inline void check_arguments(const at::Tensor& input, const char* input_name, const NmsArguments& a,
                            const NmsLastArguments& last, const char* op) {
  check_confidence(a.conf_thres, op);
  TORCH_CHECK_VALUE(a.iou_thres >= 0 && a.iou_thres <= 1, op, ": iou_thres is ", a.iou_thres,
                    ", but an IoU threshold between 0 and 1 is expected");
  check_most(a.max_det, op);
  TORCH_CHECK_VALUE(last.max_nms >= 0, op, ": max_nms is ", last.max_nms,
                    ", but 0 or more candidates an image are expected");
  TORCH_CHECK_VALUE(std::isfinite(last.max_wh) && last.max_wh >= 0, op, ": max_wh is ", last.max_wh,
                    ", but a finite number of pixels, 0 or more, is expected");
  TORCH_CHECK_VALUE(last.per_class == "offset" || last.per_class == "exact", op, ": per_class is '",
                    std::string(last.per_class), "', but 'offset' (as the stock functions) or 'exact' is expected");
  if (last.letterboxes.has_value()) check_letterboxes(*last.letterboxes, input, op, input_name);
}

// Parse `rotated`: "none", "fast" or "greedy". `has_angle` says whether a head has an extra map for the angle.
inline core::RotatedRule rotated_rule(std::string_view rotated, bool has_angle, const char* op) {
  TORCH_CHECK_VALUE(rotated == "none" || rotated == "fast" || rotated == "greedy", op, ": rotated is '",
                    std::string(rotated), "', but 'none', 'fast' (as the stock function) or 'greedy' is expected");
  if (rotated == "none") return core::RotatedRule::kNone;
  TORCH_CHECK_VALUE(has_angle, op, ": rotated is '", std::string(rotated),
                    "', but extra is empty; rotated boxes want their angle as the last extra channel");
  return rotated == "fast" ? core::RotatedRule::kFast : core::RotatedRule::kGreedy;
}

struct ExtraMeaning {
  core::ExtraKind kind = core::ExtraKind::kRaw;
  int32_t keypoint_values = 0;
};

// Return how to decode extra maps. `channels` is -1 if unknown.
inline ExtraMeaning extra_meaning(std::string_view name, int64_t channels, const char* op) {
  using core::ExtraKind;
  constexpr std::pair<std::string_view, ExtraMeaning> kNames[] = {
      {"raw", {}},
      {"angle_logit", {ExtraKind::kAngleLogit, 0}},
      {"keypoints_xy", {ExtraKind::kKeypoints, 2}},
      {"keypoints_xyv", {ExtraKind::kKeypoints, 3}},
      {"cell_keypoints_xy", {ExtraKind::kCellKeypoints, 2}},
      {"cell_keypoints_xyv", {ExtraKind::kCellKeypoints, 3}}};
  for (const auto& [known, meaning] : kNames) {
    if (name != known) continue;
    TORCH_CHECK(!meaning.keypoint_values || channels < 0 || channels % meaning.keypoint_values == 0, op, ": extra has ",
                channels, " channels, but a multiple of ", meaning.keypoint_values, " is expected with extra_kind='",
                std::string(name), "'");
    return meaning;
  }
  TORCH_CHECK_VALUE(false, op, ": extra_kind is '", std::string(name),
                    "', but 'raw', 'angle_logit', 'keypoints_xy', 'keypoints_xyv', 'cell_keypoints_xy' or "
                    "'cell_keypoints_xyv' is expected");
}

inline void fill_options(NmsRequest& request, const NmsArguments& a, const NmsLastArguments& last, at::ScalarType type,
                         const char* op) {
  NmsOptions& options = request.options;
  options.confidence = rounded_to(a.conf_thres, type);
  options.confidence_promoted = to_arithmetic_type(a.conf_thres, type);
  options.logit_floor = logit_floor(a.conf_thres);
  options.iou = to_arithmetic_type(a.iou_thres, type);
  options.max_wh = to_arithmetic_type(last.max_wh, type);
  options.reach_scale = core::reach_scale_of(options.iou);
  options.max_candidates = last.max_nms;
  options.max_detections = a.max_det;
  options.multi_label = a.multi_label && request.source.classes > 1;
  options.class_rule = a.agnostic                  ? ClassRule::kAgnostic
                       : last.per_class == "exact" ? ClassRule::kExact
                                                   : ClassRule::kOffset;
  if (a.classes.has_value()) {
    TORCH_CHECK(request.source.classes <= core::kMaxFilteredClasses, op, ": classes filters a prediction of ",
                request.source.classes, " classes, but at most ", core::kMaxFilteredClasses,
                " can be filtered; filter the detections instead");
    request.filter.active = true;
    for (const int64_t c : *a.classes) {
      if (c >= 0 && c < request.source.classes) request.filter.add(c);
    }
  }
  const int64_t candidates = (request.source.anchors + request.source.label_count) * request.source.classes;
  TORCH_CHECK(candidates < std::numeric_limits<uint32_t>::max(), op, ": the prediction has ", candidates,
              " pairs of anchor and class an image, but fewer than 2^32 - 1 are expected");
  if (last.letterboxes.has_value()) request.letterboxes = *last.letterboxes;
}

// Convert to what the core reads. Usually neither conversion has anything to do.
inline at::Tensor as_contiguous(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.to(type).contiguous();
}

inline void check_prediction(const at::Tensor& prediction, const char* op) {
  check_float(prediction, op, "prediction");
  check_strided(prediction, op, "prediction");
}

// Check prediction (B, N, 5 + classes + nm) and labels (n, 6). Sizes may be symbolic.
inline void check_yolov5_prediction(const at::Tensor& prediction, int64_t nm, const std::optional<at::Tensor>& labels,
                                    const char* op) {
  check_prediction(prediction, op);
  TORCH_CHECK_VALUE(nm >= 0, op, ": nm is ", nm, ", but 0 or more mask coefficients are expected");
  TORCH_SYM_CHECK(prediction.dim() == 3 ? prediction.sym_size(2).sym_ge(5 + nm) : c10::SymBool(false), op,
                  ": prediction has shape ", prediction.sym_sizes(),
                  ", but (images, anchors, 5 + classes + nm) with nm = ", nm, " is expected");
  if (!labels.has_value()) return;
  TORCH_SYM_CHECK(labels->dim() == 2 ? labels->sym_size(1).sym_eq(6) : c10::SymBool(false), op, ": labels has shape ",
                  labels->sym_sizes(), ", but (labels, 6) is expected: image, class, x, y, width, height");
  check_same_device(prediction, "prediction", *labels, op, "labels");
  check_float(*labels, op, "labels");
}

// Return a request whose anchors lie along dimension `anchors` of the prediction, the channels along `channels`.
inline NmsRequest prediction_request(const at::Tensor& prediction, int64_t anchors, int64_t channels) {
  NmsRequest request;
  CandidateSource& source = request.source;
  source.layout = CandidateLayout::kPrediction;
  source.dtype = core_dtype(prediction.scalar_type());
  source.images = prediction.size(0);
  source.anchors = prediction.size(anchors);
  source.data = prediction.const_data_ptr();
  source.image_stride = prediction.stride(0);
  source.anchor_stride = prediction.stride(anchors);
  source.channel_stride = prediction.stride(channels);
  return request;
}

inline NmsRequest yolov5_request(const at::Tensor& prediction, int64_t nm, const std::optional<at::Tensor>& labels) {
  NmsRequest request = prediction_request(prediction, 1, 2);
  CandidateSource& source = request.source;
  source.extra = nm;
  source.classes = prediction.size(2) - 5 - nm;
  source.has_objectness = true;
  if (labels.has_value() && labels->size(0) > 0) {
    request.labels = as_contiguous(*labels, at::kFloat);
    source.label_count = labels->size(0);
    source.labels = request.labels.const_data_ptr<float>();
  }
  return request;
}

// Check prediction (B, 4 + classes + extra, N). Sizes may be symbolic.
inline void check_ultralytics_prediction(const at::Tensor& prediction, int64_t nc, const char* op) {
  check_prediction(prediction, op);
  TORCH_CHECK_VALUE(nc >= 0, op, ": nc is ", nc, ", but 0 (all channels past the box) or more classes are expected");
  TORCH_SYM_CHECK(prediction.dim() == 3 ? prediction.sym_size(1).sym_ge(4 + nc) : c10::SymBool(false), op,
                  ": prediction has shape ", prediction.sym_sizes(),
                  ", but (images, 4 + classes + extra, anchors) with nc = ", nc, " is expected");
}

inline NmsRequest ultralytics_request(const at::Tensor& prediction, int64_t nc) {
  NmsRequest request = prediction_request(prediction, 2, 1);
  CandidateSource& source = request.source;
  source.classes = nc ? nc : prediction.size(1) - 4;
  source.extra = prediction.size(1) - 4 - source.classes;
  request.options.nan_class_drops_anchor = true;
  return request;
}

inline void check_levels(at::TensorList heads, at::ArrayRef<double> strides, const char* op, const char* name) {
  TORCH_CHECK(!heads.empty(), op, ": ", name, " is an empty list, but one map for each stride is expected");
  TORCH_CHECK(heads.size() == strides.size(), op, ": ", name, " holds ", heads.size(), " maps, but strides holds ",
              strides.size(), " numbers; one for each map is expected");
  TORCH_CHECK(heads.size() <= core::kMaxLevels, op, ": ", name, " holds ", heads.size(), " maps, but at most ",
              core::kMaxLevels, " are supported");
  for (size_t i = 0; i < heads.size(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(strides[i]) && strides[i] > 0, op, ": strides[", i, "] is ", strides[i],
                      ", but a positive number of pixels is expected");
    check_float(heads[i], op, name);
    check_strided(heads[i], op, name);
    TORCH_CHECK(heads[i].device() == heads[0].device(), op, ": ", name, "[", i, "] is on ", heads[i].device(), ", but ",
                name, "[0] is on ", heads[0].device(), "; both must be on one device");
    TORCH_CHECK(heads[i].scalar_type() == heads[0].scalar_type(), op, ": ", name, "[", i, "] has dtype ",
                dtype_name(heads[i].scalar_type()), ", but ", name, "[0] has ", dtype_name(heads[0].scalar_type()),
                "; all maps must have one dtype");
  }
}

inline core::HeadMap head_map(const at::Tensor& map) {  // (B, channels, rows, columns)
  return {nullptr, map.stride(0), 0, map.stride(1), map.stride(2), map.stride(3)};
}

// heads are (B, na * no, ny, nx) or (B, na, ny, nx, no); anchors (levels, na, 2) are in cells.
inline NmsRequest check_yolov5_heads(at::TensorList heads, const at::Tensor& anchors, at::ArrayRef<double> strides,
                                     int64_t nm, const char* op) {
  check_levels(heads, strides, op, "heads");
  check_float(anchors, op, "anchors");
  TORCH_CHECK_VALUE(nm >= 0, op, ": nm is ", nm, ", but 0 or more mask coefficients are expected");
  TORCH_CHECK(anchors.dim() == 3 && anchors.size(0) == static_cast<int64_t>(heads.size()) && anchors.size(2) == 2 &&
                  anchors.size(1) >= 1 && anchors.size(1) <= core::kMaxAnchorsPerCell,
              op, ": anchors has shape ", anchors.sizes(), ", but (", heads.size(), ", 1 to ", core::kMaxAnchorsPerCell,
              ", 2) is expected: width and height of each anchor of each map, in cells");
  TORCH_CHECK(anchors.device() == heads[0].device() || anchors.device().is_cpu(), op, ": anchors is on ",
              anchors.device(), ", but heads is on ", heads[0].device(),
              "; anchors must be on the device of the heads or on the CPU");
  const int64_t na = anchors.size(1);
  NmsRequest request;
  CandidateSource& source = request.source;
  source.layout = CandidateLayout::kAnchorHeads;
  source.dtype = core_dtype(heads[0].scalar_type());
  source.levels = static_cast<int32_t>(heads.size());
  source.anchors_per_cell = static_cast<int32_t>(na);
  source.has_objectness = true;
  source.extra = nm;
  int64_t outputs = 0;
  for (size_t i = 0; i < heads.size(); ++i) {
    const at::Tensor& head = heads[i];
    TORCH_CHECK(head.dim() == 4 || head.dim() == 5, op, ": heads[", i, "] has shape ", head.sizes(),
                ", but (images, na * no, ny, nx) or (images, na, ny, nx, no) is expected");
    const bool split = head.dim() == 5;
    const int64_t no = split ? head.size(4) : head.size(1) / na;
    TORCH_CHECK(split ? head.size(1) == na : head.size(1) % na == 0, op, ": heads[", i, "] has shape ", head.sizes(),
                ", which does not fit the ", na, " anchors a cell that anchors gives");
    if (i == 0) {
      source.images = head.size(0);
      outputs = no;
      TORCH_CHECK(no >= 5 + nm, op, ": heads[0] has ", no, " channels an anchor, but at least 5 + nm = ", 5 + nm,
                  " are expected");
    }
    TORCH_CHECK(head.size(0) == source.images && no == outputs, op, ": heads[", i, "] has ", head.size(0),
                " images and ", no, " channels an anchor, but heads[0] has ", source.images, " and ", outputs);
    core::HeadLevel& level = source.level[i];
    level.stride = strides[i];
    level.rows = static_cast<int32_t>(head.size(2));
    level.columns = static_cast<int32_t>(head.size(3));
    level.first_anchor = source.anchors;
    source.anchors += na * level.rows * level.columns;
    core::HeadMap& map = level.boxes;
    if (split) {
      map = {nullptr, head.stride(0), head.stride(1), head.stride(4), head.stride(2), head.stride(3)};
    } else {
      map = head_map(head);
      map.anchor = no * head.stride(1);
    }
  }
  TORCH_CHECK(source.anchors < std::numeric_limits<int32_t>::max(), op, ": heads hold ", source.anchors,
              " anchors an image, but fewer than 2^31 - 1 are expected");
  source.classes = outputs - 5 - nm;
  request.anchors = anchors;
  return request;
}

// boxes[i] is (B, 4 * reg_max, ny, nx) and scores[i] (B, nc, ny, nx); extra is empty or (B, ne, ny, nx).
inline NmsRequest check_ultralytics_heads(at::TensorList boxes, at::TensorList scores, at::TensorList extra,
                                          at::ArrayRef<double> strides, const char* op) {
  check_levels(boxes, strides, op, "boxes");
  check_levels(scores, strides, op, "scores");
  if (!extra.empty()) check_levels(extra, strides, op, "extra");
  TORCH_CHECK(boxes[0].dim() == 4 && boxes[0].size(1) >= 4 && boxes[0].size(1) % 4 == 0, op, ": boxes[0] has shape ",
              boxes[0].sizes(), ", but (images, 4 * reg_max, ny, nx) is expected");
  TORCH_CHECK(scores[0].dim() == 4, op, ": scores[0] has shape ", scores[0].sizes(),
              ", but (images, classes, ny, nx) is expected");
  NmsRequest request;
  CandidateSource& source = request.source;
  source.layout = CandidateLayout::kAnchorFreeHeads;
  source.dtype = core_dtype(boxes[0].scalar_type());
  source.images = boxes[0].size(0);
  source.levels = static_cast<int32_t>(boxes.size());
  source.bins = static_cast<int32_t>(boxes[0].size(1) / 4);
  source.classes = scores[0].size(1);
  for (size_t i = 0; i < boxes.size(); ++i) {
    const int64_t rows = boxes[i].dim() == 4 ? boxes[i].size(2) : -1, columns = rows >= 0 ? boxes[i].size(3) : -1;
    const auto check_map = [&](const at::Tensor& map, const char* name, int64_t channels) {
      TORCH_CHECK(map.scalar_type() == boxes[0].scalar_type(), op, ": ", name, "[", i, "] has dtype ",
                  dtype_name(map.scalar_type()), ", but boxes[0] has ", dtype_name(boxes[0].scalar_type()),
                  "; all maps must have one dtype");
      check_same_device(boxes[0], "boxes", map, op, name);
      TORCH_CHECK(map.dim() == 4 && map.size(0) == source.images && map.size(1) == channels && map.size(2) == rows &&
                      map.size(3) == columns,
                  op, ": ", name, "[", i, "] has shape ", map.sizes(), ", but (", source.images, ", ", channels, ", ",
                  rows, ", ", columns, ") is expected, as the other maps have");
    };
    check_map(boxes[i], "boxes", boxes[0].size(1));
    check_map(scores[i], "scores", source.classes);
    core::HeadLevel& level = source.level[i];
    level.boxes = head_map(boxes[i]);
    level.scores = head_map(scores[i]);
    if (!extra.empty()) {
      if (i == 0) {
        TORCH_CHECK(extra[0].dim() == 4, op, ": extra[0] has shape ", extra[0].sizes(),
                    ", but (images, channels, ny, nx) is expected");
        source.extra = extra[0].size(1);
      }
      check_map(extra[i], "extra", source.extra);
      level.extra = head_map(extra[i]);
    }
    level.stride = strides[i];
    level.rows = static_cast<int32_t>(rows);
    level.columns = static_cast<int32_t>(columns);
    level.first_anchor = source.anchors;
    source.anchors += rows * columns;
  }
  TORCH_CHECK(source.anchors < std::numeric_limits<int32_t>::max(), op, ": boxes hold ", source.anchors,
              " anchors an image, but fewer than 2^31 - 1 are expected");
  request.options.nan_class_drops_anchor = true;
  return request;
}

// Set data pointers. Tensors without storage (meta) have none, so call this after the checks, on real devices only.
inline void fill_heads(NmsRequest& request, at::TensorList boxes, at::TensorList scores = {},
                       at::TensorList extra = {}) {
  for (size_t i = 0; i < boxes.size(); ++i) {
    core::HeadLevel& level = request.source.level[i];
    level.boxes.data = boxes[i].const_data_ptr();
    if (!scores.empty()) level.scores.data = scores[i].const_data_ptr();
    if (!extra.empty()) level.extra.data = extra[i].const_data_ptr();
  }
}

inline void fill_anchors(NmsRequest& request, bool on_device) {
  request.anchors = as_contiguous(request.anchors, at::kFloat);
  const float* sides = request.anchors.const_data_ptr<float>();
  if (on_device && !request.anchors.device().is_cpu()) {
    request.source.anchor_sides_device = sides;
  } else {
    std::memcpy(request.source.anchor_sides, sides, request.anchors.numel() * sizeof(float));
  }
}

// Check boxes (B, n, 4 or more) and letterboxes (B, 6).
inline void check_scale_boxes(const at::Tensor& boxes, const at::Tensor& letterboxes) {
  const char* op = "scale_boxes";
  check_float(boxes, op, "boxes");
  check_strided(boxes, op, "boxes");
  TORCH_SYM_CHECK(boxes.dim() == 3 ? boxes.sym_size(2).sym_ge(4) : c10::SymBool(false), op, ": boxes has shape ",
                  boxes.sym_sizes(), ", but (images, boxes, 4 or more columns) is expected");
  check_letterboxes(letterboxes, boxes, op, "boxes");
}

inline void check_filter(const at::Tensor& prediction, double conf_thres, int64_t max_det,
                         const std::optional<at::Tensor>& sizes) {
  const char* op = "filter_detections";
  check_prediction(prediction, op);
  TORCH_SYM_CHECK(prediction.dim() == 3 ? prediction.sym_size(2).sym_ge(6) : c10::SymBool(false), op,
                  ": prediction has shape ", prediction.sym_sizes(),
                  ", but (images, rows, 6 or more columns) is expected");
  check_confidence(conf_thres, op);
  check_most(max_det, op);
  if (!sizes.has_value()) return;
  check_float(*sizes, op, "sizes");
  check_same_device(prediction, "prediction", *sizes, op, "sizes");
  const auto fits = [&] { return same_sizes(*sizes, prediction, {0}).sym_and(sizes->sym_size(1).sym_eq(2)); };
  TORCH_SYM_CHECK(sizes->dim() == 2 ? fits() : c10::SymBool(false), op, ": sizes has shape ", sizes->sym_sizes(),
                  ", but (", prediction.sym_size(0), ", 2) is expected: width and height of each image");
}

// `sizes` must already have the arithmetic type, or be undefined.
inline core::FilterParams filter_params(const at::Tensor& prediction, const at::Tensor& sizes, double conf_thres,
                                        at::OptionalIntArrayRef classes, const char* op) {
  core::FilterParams params;
  params.rows = prediction.const_data_ptr();
  params.sizes = sizes.defined() ? sizes.const_data_ptr() : nullptr;
  params.images = prediction.size(0);
  params.count = prediction.size(1);
  params.columns = prediction.size(2);
  params.image_stride = prediction.stride(0);
  params.row_stride = prediction.stride(1);
  params.column_stride = prediction.stride(2);
  params.confidence = rounded_to(conf_thres, prediction.scalar_type());
  params.dtype = core_dtype(prediction.scalar_type());
  params.filter.active = classes.has_value();
  for (const int64_t c : classes.value_or(at::IntArrayRef())) {
    TORCH_CHECK(c < core::kMaxFilteredClasses, op, ": classes names class ", c, ", but classes below ",
                core::kMaxFilteredClasses, " are expected");
    if (c >= 0) params.filter.add(c);
  }
  return params;
}

// `letterboxes` must already have the arithmetic type.
inline core::ScaleBoxesParams scale_boxes_params(const at::Tensor& boxes, const at::Tensor& letterboxes, bool xywh) {
  core::ScaleBoxesParams params;
  params.boxes = boxes.const_data_ptr();
  params.letterboxes = letterboxes.const_data_ptr();
  params.images = boxes.size(0);
  params.count = boxes.size(1);
  params.columns = boxes.size(2);
  params.image_stride = boxes.stride(0);
  params.box_stride = boxes.stride(1);
  params.column_stride = boxes.stride(2);
  params.center_size = xywh;
  params.dtype = core_dtype(boxes.scalar_type());
  return params;
}

}  // namespace torch_fastdet
