// Padded non-maximum suppression on the GPU: checks, guards the device, allocates results and one workspace, launches.
#include "ops/nms/checks.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "core/nms/nms_launch.h"
#include "ops/common/launch.h"

namespace torch_fastdet {
namespace {

int64_t shared_memory_limit(int device) {
  int bytes = 0;
  check_launch(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared_memory_limit");
  return bytes;
}

// The device of `input` is current.
Detections suppress(const NmsRequest& request, const at::Tensor& input, const char* op) {
  const int64_t images = request.source.images;
  TORCH_CHECK_VALUE(images <= 65535, op, ": a batch of ", images, " images came, but at most 65535 are taken at once");
  Detections detections = empty_detections(request, input);
  const core::NmsPlan plan = core::plan_nms(request.source, request.options, shared_memory_limit(input.get_device()));
  at::Tensor workspace = at::empty({static_cast<int64_t>(plan.bytes)}, input.options().dtype(at::kByte));
  check_launch(core::launch_nms(request.source, request.options, request.filter, nms_output(request, detections), plan,
                                workspace.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()),
               op);
  return detections;
}

std::tuple<at::Tensor, at::Tensor> non_max_suppression_padded(
    const at::Tensor& prediction, double conf_thres, double iou_thres, at::OptionalIntArrayRef classes, bool agnostic,
    bool multi_label, int64_t max_det, int64_t nm, const std::optional<at::Tensor>& labels,
    const std::optional<at::Tensor>& letterboxes, std::string_view per_class, int64_t max_nms, double max_wh) {
  const char* op = "non_max_suppression_padded";
  const c10::cuda::CUDAGuard guard(prediction.device());
  NmsRequest request = check_yolov5_prediction(
      prediction, nm, {conf_thres, iou_thres, classes, agnostic, multi_label, max_det, max_nms, max_wh, per_class},
      labels, letterboxes, op);
  fill_labels(request);
  request.source.data = prediction.const_data_ptr();
  return without_indices(suppress(request, prediction, op));
}

Detections ultralytics_non_max_suppression_padded(const at::Tensor& prediction, double conf_thres, double iou_thres,
                                                  at::OptionalIntArrayRef classes, bool agnostic, bool multi_label,
                                                  int64_t max_det, int64_t nc,
                                                  const std::optional<at::Tensor>& letterboxes,
                                                  std::string_view per_class, int64_t max_nms, double max_wh) {
  const char* op = "ultralytics_non_max_suppression_padded";
  const c10::cuda::CUDAGuard guard(prediction.device());
  NmsRequest request = check_ultralytics_prediction(
      prediction, nc, {conf_thres, iou_thres, classes, agnostic, multi_label, max_det, max_nms, max_wh, per_class},
      letterboxes, op);
  request.source.data = prediction.const_data_ptr();
  return suppress(request, prediction, op);
}

std::tuple<at::Tensor, at::Tensor> yolov5_postprocess(at::TensorList heads, const at::Tensor& anchors,
                                                      at::ArrayRef<double> strides, double conf_thres, double iou_thres,
                                                      at::OptionalIntArrayRef classes, bool agnostic, bool multi_label,
                                                      int64_t max_det, int64_t nm,
                                                      const std::optional<at::Tensor>& letterboxes,
                                                      std::string_view per_class, int64_t max_nms, double max_wh) {
  NmsRequest request = check_yolov5_postprocess(
      heads, anchors, strides, nm,
      {conf_thres, iou_thres, classes, agnostic, multi_label, max_det, max_nms, max_wh, per_class}, letterboxes);
  const c10::cuda::CUDAGuard guard(heads[0].device());
  fill_heads(request, heads);
  fill_anchors(request, true);
  return without_indices(suppress(request, heads[0], "yolov5_postprocess"));
}

Detections ultralytics_postprocess(at::TensorList boxes, at::TensorList scores, at::TensorList extra,
                                   at::ArrayRef<double> strides, double conf_thres, double iou_thres,
                                   at::OptionalIntArrayRef classes, bool agnostic, bool multi_label, int64_t max_det,
                                   const std::optional<at::Tensor>& letterboxes, std::string_view per_class,
                                   int64_t max_nms, double max_wh) {
  NmsRequest request = check_ultralytics_postprocess(
      boxes, scores, extra, strides,
      {conf_thres, iou_thres, classes, agnostic, multi_label, max_det, max_nms, max_wh, per_class}, letterboxes);
  const c10::cuda::CUDAGuard guard(boxes[0].device());
  fill_heads(request, boxes, scores, extra);
  return suppress(request, boxes[0], "ultralytics_postprocess");
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  m.impl("non_max_suppression_padded", non_max_suppression_padded);
  m.impl("ultralytics_non_max_suppression_padded", ultralytics_non_max_suppression_padded);
  m.impl("yolov5_postprocess", yolov5_postprocess);
  m.impl("ultralytics_postprocess", ultralytics_postprocess);
}

}  // namespace torch_fastdet
