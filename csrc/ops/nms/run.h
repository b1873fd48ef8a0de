// Run the post-processing operators except the work, which is Backend::run() of cpu.cpp and cuda.cpp.
#pragma once

#include "core/nms/decode.h"
#include "ops/common/backend.h"
#include "ops/nms/checks.h"

namespace torch_fastdet {

// The device of `input` must be current.
template <class Backend>
Detections suppress(NmsRequest& request, const at::Tensor& input, const NmsArguments& arguments,
                    const NmsLastArguments& last, const char* op) {
  fill_options(request, arguments, last, input.scalar_type(), op);
  TORCH_CHECK_VALUE(request.source.images <= Backend::kMaxImages, op, ": a batch of ", request.source.images,
                    " images came, but at most ", Backend::kMaxImages, " are taken at once");
  if (request.letterboxes.defined()) request.letterboxes = as_contiguous(request.letterboxes, arithmetic_type(input));
  Detections detections = empty_detections(input, request.source.images, arguments.max_det, request.source.extra);
  Backend::run(request, nms_output(request, detections), input, op);
  return detections;
}

template <class Backend>
std::tuple<at::Tensor, at::Tensor> non_max_suppression_padded(const at::Tensor& prediction,
                                                              const NmsArguments& arguments, int64_t nm,
                                                              const std::optional<at::Tensor>& labels,
                                                              const NmsLastArguments& last) {
  constexpr const char* kOp = "non_max_suppression_padded";
  check_yolov5_prediction(prediction, nm, labels, kOp);
  check_arguments(prediction, "prediction", arguments, last, kOp);
  const c10::DeviceGuard guard(prediction.device());
  if constexpr (Backend::kMeta) {
    return without_indices(empty_detections(prediction, prediction.sym_size(0), arguments.max_det, nm));
  } else {
    NmsRequest request = yolov5_request(prediction, nm, labels);
    return without_indices(suppress<Backend>(request, prediction, arguments, last, kOp));
  }
}

template <class Backend>
Detections ultralytics_non_max_suppression_padded(const at::Tensor& prediction, const NmsArguments& arguments,
                                                  int64_t nc, const NmsLastArguments& last, std::string_view rotated) {
  constexpr const char* kOp = "ultralytics_non_max_suppression_padded";
  check_ultralytics_prediction(prediction, nc, kOp);
  const core::RotatedRule rule = rotated_rule(rotated, true, kOp);
  check_arguments(prediction, "prediction", arguments, last, kOp);
  const c10::DeviceGuard guard(prediction.device());
  if constexpr (Backend::kMeta) {
    const c10::SymInt extra = nc ? prediction.sym_size(1) - 4 - nc : c10::SymInt(0);
    return empty_detections(prediction, prediction.sym_size(0), arguments.max_det, extra);
  } else {
    NmsRequest request = ultralytics_request(prediction, nc);
    request.options.rotated = rule;
    return suppress<Backend>(request, prediction, arguments, last, kOp);
  }
}

template <class Backend>
std::tuple<at::Tensor, at::Tensor> yolov5_postprocess(at::TensorList heads, const at::Tensor& anchors,
                                                      at::ArrayRef<double> strides, const NmsArguments& arguments,
                                                      int64_t nm, const NmsLastArguments& last) {
  constexpr const char* kOp = "yolov5_postprocess";
  NmsRequest request;
  if (!Backend::kMeta || has_plain_sizes({anchors}, heads)) {
    request = check_yolov5_heads(heads, anchors, strides, nm, kOp);
  }
  check_arguments(heads[0], "heads", arguments, last, kOp);
  const c10::DeviceGuard guard(heads[0].device());
  if constexpr (Backend::kMeta) {
    return without_indices(empty_detections(heads[0], heads[0].sym_size(0), arguments.max_det, nm));
  } else {
    fill_heads(request, heads);
    fill_anchors(request, Backend::kReadsDeviceAnchors);
    return without_indices(suppress<Backend>(request, heads[0], arguments, last, kOp));
  }
}

template <class Backend>
Detections ultralytics_postprocess(at::TensorList boxes, at::TensorList scores, at::TensorList extra,
                                   at::ArrayRef<double> strides, const NmsArguments& arguments,
                                   const NmsLastArguments& last, std::string_view rotated,
                                   std::string_view extra_kind) {
  constexpr const char* kOp = "ultralytics_postprocess";
  NmsRequest request;
  if (!Backend::kMeta || (has_plain_sizes({}, boxes) && has_plain_sizes({}, scores) && has_plain_sizes({}, extra))) {
    request = check_ultralytics_heads(boxes, scores, extra, strides, kOp);
  }
  const ExtraMeaning meaning = extra_meaning(extra_kind, request.source.levels ? request.source.extra : -1, kOp);
  request.source.extra_kind = meaning.kind;
  request.source.keypoint_values = meaning.keypoint_values;
  request.options.rotated = rotated_rule(rotated, !extra.empty(), kOp);
  check_arguments(boxes[0], "boxes", arguments, last, kOp);
  const c10::DeviceGuard guard(boxes[0].device());
  if constexpr (Backend::kMeta) {
    const c10::SymInt columns = extra.empty() ? c10::SymInt(0) : extra[0].sym_size(1);
    return empty_detections(boxes[0], boxes[0].sym_size(0), arguments.max_det, columns);
  } else {
    fill_heads(request, boxes, scores, extra);
    return suppress<Backend>(request, boxes[0], arguments, last, kOp);
  }
}

template <class Backend>
at::Tensor yolov5_decode(at::TensorList heads, const at::Tensor& anchors, at::ArrayRef<double> strides, int64_t nm) {
  constexpr const char* kOp = "yolov5_decode";
  NmsRequest request;
  if (!Backend::kMeta || has_plain_sizes({anchors}, heads)) {
    request = check_yolov5_heads(heads, anchors, strides, nm, kOp);
  }
  const c10::DeviceGuard guard(heads[0].device());
  if constexpr (Backend::kMeta) {
    const c10::SymInt na = anchors.sym_size(1);
    c10::SymInt count = 0;
    for (const at::Tensor& head : heads) count += na * head.sym_size(2) * head.sym_size(3);
    const c10::SymInt columns = heads[0].dim() == 5 ? heads[0].sym_size(4) : heads[0].sym_size(1) / na;
    return at::empty_symint({heads[0].sym_size(0), count, columns}, heads[0].options());
  } else {
    fill_heads(request, heads);
    fill_anchors(request, Backend::kReadsDeviceAnchors);
    const CandidateSource& source = request.source;
    at::Tensor output = at::empty({source.images, source.anchors, 5 + source.classes + nm}, heads[0].options(),
                                  at::MemoryFormat::Contiguous);
    Backend::run(core::DecodeParams{source, output.mutable_data_ptr()}, kOp);
    return output;
  }
}

template <class Backend>
Detections filter_detections(const at::Tensor& prediction, double conf_thres, at::OptionalIntArrayRef classes,
                             int64_t max_det, const std::optional<at::Tensor>& sizes, bool finite) {
  constexpr const char* kOp = "filter_detections";
  check_filter(prediction, conf_thres, max_det, sizes);
  const c10::DeviceGuard guard(prediction.device());
  Detections detections = empty_detections(prediction, prediction.sym_size(0), max_det, prediction.sym_size(2) - 6);
  if constexpr (!Backend::kMeta) {
    const at::Tensor rows = sizes ? as_contiguous(*sizes, arithmetic_type(prediction)) : at::Tensor();
    core::FilterParams params = filter_params(prediction, rows, conf_thres, classes, kOp);
    params.output = detections_output(detections);
    params.capacity = max_det;
    params.finite = finite;
    Backend::run(params, kOp);
  }
  return detections;
}

template <class Backend>
at::Tensor scale_boxes(const at::Tensor& boxes, const at::Tensor& letterboxes, bool xywh) {
  constexpr const char* kOp = "scale_boxes";
  check_scale_boxes(boxes, letterboxes);
  const c10::DeviceGuard guard(boxes.device());
  at::Tensor output = at::empty_symint(boxes.sym_sizes(), boxes.options(), at::MemoryFormat::Contiguous);
  if constexpr (!Backend::kMeta) {
    const at::Tensor rows = as_contiguous(letterboxes, arithmetic_type(boxes));
    core::ScaleBoxesParams params = scale_boxes_params(boxes, rows, xywh);
    params.output = output.mutable_data_ptr();
    Backend::run(params, kOp);
  }
  return output;
}

template <class Backend>
void register_nms(torch::Library& m) {
  m.impl("non_max_suppression_padded", unpack<&non_max_suppression_padded<Backend>>);
  m.impl("ultralytics_non_max_suppression_padded", unpack<&ultralytics_non_max_suppression_padded<Backend>>);
  m.impl("yolov5_postprocess", unpack<&yolov5_postprocess<Backend>>);
  m.impl("ultralytics_postprocess", unpack<&ultralytics_postprocess<Backend>>);
  m.impl("yolov5_decode", TORCH_FN(yolov5_decode<Backend>));
  m.impl("filter_detections", TORCH_FN(filter_detections<Backend>));
  m.impl("scale_boxes", TORCH_FN(scale_boxes<Backend>));
}

}  // namespace torch_fastdet
