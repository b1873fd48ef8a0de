// Run yolov5_loss and its backward except Backend::run() of cpu.cpp and cuda.cpp. Backend::scratch(params) is the
// number of additional values of the arithmetic type that the forward pass needs.
#pragma once

#include "ops/common/backend.h"
#include "ops/yolov5_loss/checks.h"

namespace torch_fastdet {

template <class Backend>
Yolov5LossResult yolov5_loss(at::TensorList heads, const at::Tensor& targets, const at::Tensor& anchors,
                             const at::Tensor& balance, const std::optional<at::Tensor>& num_targets,
                             const Yolov5LossOptions& options) {
  // Symbolic sizes cannot be compared with numbers in a message; the kernel checks them when it runs.
  if (!Backend::kMeta || has_plain_sizes({targets, anchors}, heads)) {
    check_yolov5_loss(heads, targets, anchors, balance, num_targets, options);
  }
  const c10::DeviceGuard guard(heads[0].device());
  auto result = empty_yolov5_loss(heads, targets, anchors);
  if constexpr (!Backend::kMeta) {
    const auto rows = targets.contiguous(), sizes = anchors.contiguous(), weights = balance.contiguous();
    auto params = yolov5_loss_params(heads, rows, sizes, weights, num_targets, options, result);
    const auto scratch = at::empty({Backend::scratch(params)}, arithmetic_options(heads[0]));
    Backend::run(params, scratch);
  }
  return result;
}

template <class Backend>
std::vector<at::Tensor> yolov5_loss_backward(const at::Tensor& grad_loss, at::TensorList heads,
                                             const at::Tensor& targets, const Yolov5LossTensors& state,
                                             const Yolov5ClassOptions& options) {
  if constexpr (Backend::kMeta) {
    return empty_yolov5_gradients<c10::SymInt>(heads, state.match_cell.sym_size(2));
  } else {
    check_yolov5_loss_backward(grad_loss, heads, targets, state);
    const c10::DeviceGuard guard(heads[0].device());
    const auto rows = targets.contiguous();
    auto gradients = empty_yolov5_gradients<int64_t>(heads, state.match_cell.size(2));
    Backend::run(yolov5_loss_backward_params(grad_loss, heads, gradients, rows, state, options));
    return gradients;
  }
}

template <class Backend>
void register_yolov5_loss(torch::Library& m) {
  m.impl("yolov5_loss", unpack<&yolov5_loss<Backend>>);
  m.impl("yolov5_loss_backward", unpack<&yolov5_loss_backward<Backend>>);
}

}  // namespace torch_fastdet
