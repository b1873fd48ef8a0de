// Shapes of the post-processing operators.
#include "ops/nms/checks.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace torch_fastdet {
namespace {

using Detections = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

at::Tensor detections(const at::Tensor& input, const c10::SymInt& images, int64_t max_det, const c10::SymInt& extra) {
  return at::empty_symint({images, max_det, extra + 6}, input.options().dtype(detection_type(input.scalar_type())));
}

at::Tensor counts(const at::Tensor& input, const c10::SymInt& images) {
  return at::empty_symint({images}, input.options().dtype(at::kLong));
}

at::Tensor indices(const at::Tensor& input, const c10::SymInt& images, int64_t max_det) {
  return at::empty_symint({images, max_det}, input.options().dtype(at::kLong));
}

// The checks want plain sizes; under dynamic shapes they run with the real call alone.
bool has_plain_sizes(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
  }
  return true;
}

std::tuple<at::Tensor, at::Tensor> non_max_suppression_padded(
    const at::Tensor& prediction, double conf_thres, double iou_thres, at::OptionalIntArrayRef classes, bool agnostic,
    bool multi_label, int64_t max_det, int64_t nm, const std::optional<at::Tensor>& labels,
    const std::optional<at::Tensor>& letterboxes, std::string_view per_class, int64_t max_nms, double max_wh) {
  if (has_plain_sizes(prediction)) {
    check_yolov5_prediction(
        prediction, nm, {conf_thres, iou_thres, classes, agnostic, multi_label, max_det, max_nms, max_wh, per_class},
        labels, letterboxes, "non_max_suppression_padded");
  }
  const c10::SymInt images = prediction.sym_size(0);
  return {detections(prediction, images, max_det, nm), counts(prediction, images)};
}

Detections ultralytics_non_max_suppression_padded(const at::Tensor& prediction, double conf_thres, double iou_thres,
                                                  at::OptionalIntArrayRef classes, bool agnostic, bool multi_label,
                                                  int64_t max_det, int64_t nc,
                                                  const std::optional<at::Tensor>& letterboxes,
                                                  std::string_view per_class, int64_t max_nms, double max_wh) {
  if (has_plain_sizes(prediction)) {
    check_ultralytics_prediction(
        prediction, nc, {conf_thres, iou_thres, classes, agnostic, multi_label, max_det, max_nms, max_wh, per_class},
        letterboxes, "ultralytics_non_max_suppression_padded");
  }
  const c10::SymInt images = prediction.sym_size(0);
  const c10::SymInt extra = nc ? prediction.sym_size(1) - 4 - nc : c10::SymInt(0);
  return {detections(prediction, images, max_det, extra), counts(prediction, images),
          indices(prediction, images, max_det)};
}

std::tuple<at::Tensor, at::Tensor> yolov5_postprocess(at::TensorList heads, const at::Tensor& anchors,
                                                      at::ArrayRef<double> strides, double conf_thres, double iou_thres,
                                                      at::OptionalIntArrayRef classes, bool agnostic, bool multi_label,
                                                      int64_t max_det, int64_t nm,
                                                      const std::optional<at::Tensor>& letterboxes,
                                                      std::string_view per_class, int64_t max_nms, double max_wh) {
  if (has_plain_sizes(heads)) {
    check_yolov5_postprocess(
        heads, anchors, strides, nm,
        {conf_thres, iou_thres, classes, agnostic, multi_label, max_det, max_nms, max_wh, per_class}, letterboxes);
  }
  const c10::SymInt images = heads[0].sym_size(0);
  return {detections(heads[0], images, max_det, nm), counts(heads[0], images)};
}

Detections ultralytics_postprocess(at::TensorList boxes, at::TensorList scores, at::TensorList extra,
                                   at::ArrayRef<double> strides, double conf_thres, double iou_thres,
                                   at::OptionalIntArrayRef classes, bool agnostic, bool multi_label, int64_t max_det,
                                   const std::optional<at::Tensor>& letterboxes, std::string_view per_class,
                                   int64_t max_nms, double max_wh) {
  if (has_plain_sizes(boxes) && has_plain_sizes(scores) && has_plain_sizes(extra)) {
    check_ultralytics_postprocess(
        boxes, scores, extra, strides,
        {conf_thres, iou_thres, classes, agnostic, multi_label, max_det, max_nms, max_wh, per_class}, letterboxes);
  }
  const c10::SymInt images = boxes[0].sym_size(0);
  const c10::SymInt columns = extra.empty() ? c10::SymInt(0) : extra[0].sym_size(1);
  return {detections(boxes[0], images, max_det, columns), counts(boxes[0], images), indices(boxes[0], images, max_det)};
}

at::Tensor yolov5_decode(at::TensorList heads, const at::Tensor& anchors, at::ArrayRef<double> strides, int64_t nm) {
  if (has_plain_sizes(heads)) check_yolov5_heads(heads, anchors, strides, nm, "yolov5_decode");
  TORCH_CHECK_VALUE(!heads.empty(), "yolov5_decode: heads is an empty list, but one map for each stride is wanted");
  const c10::SymInt na = anchors.sym_size(1);
  c10::SymInt count = 0;
  for (const at::Tensor& head : heads) count += na * head.sym_size(2) * head.sym_size(3);
  const c10::SymInt columns = heads[0].dim() == 5 ? heads[0].sym_size(4) : heads[0].sym_size(1) / na;
  return at::empty_symint({heads[0].sym_size(0), count, columns}, heads[0].options());
}

at::Tensor scale_boxes(const at::Tensor& boxes, const at::Tensor& letterboxes, bool xywh) {
  if (has_plain_sizes({boxes, letterboxes})) check_scale_boxes(boxes, letterboxes);
  return at::empty_symint(boxes.sym_sizes(), boxes.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  m.impl("non_max_suppression_padded", non_max_suppression_padded);
  m.impl("ultralytics_non_max_suppression_padded", ultralytics_non_max_suppression_padded);
  m.impl("yolov5_postprocess", yolov5_postprocess);
  m.impl("ultralytics_postprocess", ultralytics_postprocess);
  m.impl("yolov5_decode", yolov5_decode);
  m.impl("scale_boxes", scale_boxes);
}

}  // namespace torch_fastdet
