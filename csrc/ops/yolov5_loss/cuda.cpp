// CUDA glue of the YOLOv5 loss: checks, allocates, launches on the current stream.
#include <torch/library.h>

#include "ops/common/launch.h"
#include "ops/yolov5_loss/checks.h"

namespace torch_fastdet {
namespace {

Yolov5LossResult yolov5_loss(at::TensorList heads, const at::Tensor& targets, const at::Tensor& anchors,
                             const at::Tensor& balance, const std::optional<at::Tensor>& num_targets, double box,
                             double obj, double cls, double cls_pw, double obj_pw, double label_smoothing,
                             double fl_gamma, double anchor_t, double gr, bool sort_obj_iou) {
  check_yolov5_loss(heads, targets, anchors, balance, num_targets, label_smoothing, anchor_t);
  const c10::cuda::CUDAGuard guard(heads[0].device());
  const auto rows = targets.contiguous(), sizes = anchors.contiguous(), weights = balance.contiguous();
  auto result = empty_yolov5_loss(heads, targets, anchors);
  auto params = yolov5_loss_params(heads, rows, sizes, weights, num_targets, box, obj, cls, cls_pw, obj_pw,
                                   label_smoothing, fl_gamma, anchor_t, gr, sort_obj_iou, result);
  const int64_t match_sums = 3 * params.nl * core::yolov5_match_blocks(params);
  const auto partials =
      at::empty({match_sums + params.nl * core::yolov5_object_blocks(params)}, yolov5_scalar_options(heads[0]));
  params.match_partials = partials.data_ptr();
  params.object_partials = static_cast<char*>(partials.data_ptr()) + match_sums * partials.element_size();
  check_launch(core::launch_yolov5_loss(params, c10::cuda::getCurrentCUDAStream()), "yolov5_loss");
  return result;
}

std::vector<at::Tensor> yolov5_loss_backward(const at::Tensor& grad_loss, at::TensorList heads,
                                             const at::Tensor& targets, const at::Tensor& levels,
                                             const at::Tensor& owner, const at::Tensor& match_cell,
                                             const at::Tensor& match_values, const at::Tensor& object_gradient,
                                             double cls_pw, double label_smoothing, double fl_gamma) {
  check_yolov5_loss_backward(grad_loss, heads, targets, levels, owner, match_cell, match_values, object_gradient);
  const c10::cuda::CUDAGuard guard(heads[0].device());
  const auto rows = targets.contiguous();
  auto gradients = empty_yolov5_gradients<int64_t>(heads, match_cell.size(2));
  const auto params = yolov5_loss_backward_params(grad_loss, heads, gradients, rows, levels, owner, match_cell,
                                                  match_values, object_gradient, cls_pw, label_smoothing, fl_gamma);
  check_launch(core::launch_yolov5_loss_backward(params, c10::cuda::getCurrentCUDAStream()), "yolov5_loss_backward");
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  m.impl("yolov5_loss", &yolov5_loss);
  m.impl("yolov5_loss_backward", &yolov5_loss_backward);
}

}  // namespace torch_fastdet
