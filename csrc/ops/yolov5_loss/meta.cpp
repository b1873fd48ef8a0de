// Meta kernels of the YOLOv5 loss: shapes and dtypes only.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/yolov5_loss/checks.h"

namespace torch_fastdet {
namespace {

// Sizes that are still symbolic cannot be compared with numbers in a message; the kernel checks them when it runs.
bool is_symbolic(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

Yolov5LossResult yolov5_loss(at::TensorList heads, const at::Tensor& targets, const at::Tensor& anchors,
                             const at::Tensor& balance, const std::optional<at::Tensor>& num_targets, double /*box*/,
                             double /*obj*/, double /*cls*/, double /*cls_pw*/, double /*obj_pw*/,
                             double label_smoothing, double /*fl_gamma*/, double anchor_t, double /*gr*/,
                             bool /*sort_obj_iou*/) {
  if (!std::any_of(heads.begin(), heads.end(), is_symbolic) && !is_symbolic(targets) && !is_symbolic(anchors)) {
    check_yolov5_loss(heads, targets, anchors, balance, num_targets, label_smoothing, anchor_t);
  }
  return empty_yolov5_loss(heads, targets, anchors);
}

std::vector<at::Tensor> yolov5_loss_backward(const at::Tensor& /*grad_loss*/, at::TensorList heads,
                                             const at::Tensor& /*targets*/, const at::Tensor& /*levels*/,
                                             const at::Tensor& /*owner*/, const at::Tensor& match_cell,
                                             const at::Tensor& /*match_values*/, const at::Tensor& /*object_gradient*/,
                                             double /*cls_pw*/, double /*label_smoothing*/, double /*fl_gamma*/) {
  return empty_yolov5_gradients<c10::SymInt>(heads, match_cell.sym_size(2));
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  m.impl("yolov5_loss", &yolov5_loss);
  m.impl("yolov5_loss_backward", &yolov5_loss_backward);
}

}  // namespace torch_fastdet
