// Registers the multi_tensor operators under one dispatch key. Their bodies are the same on every device.
#pragma once

#include <torch/library.h>

#include "ops/multi_tensor/run.h"

namespace torch_fastdet::multi_tensor {

template <bool kMeta>
void implement(torch::Library& m) {
  m.impl("multi_tensor_ema_",
         [](at::TensorList averages, at::TensorList values, double decay) { ema(averages, values, decay, kMeta); });
  m.impl("multi_tensor_ema_.tensor", [](at::TensorList averages, at::TensorList values, const at::Tensor& decay) {
    ema(averages, values, decay, kMeta);
  });
  m.impl("multi_tensor_sgd_",
         [](at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, double lr, double momentum,
            double dampening, double weight_decay, bool nesterov, bool maximize, bool is_first_step,
            const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
           sgd(params, grads, momentum_buffers, lr, momentum, dampening, weight_decay, nesterov, maximize,
               is_first_step, grad_scale, found_inf, kMeta);
         });
  m.impl(
      "multi_tensor_sgd_.tensor",
      [](at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, const at::Tensor& lr,
         const at::Tensor& momentum, double dampening, double weight_decay, bool nesterov, bool maximize,
         bool is_first_step, const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf) {
        sgd(params, grads, momentum_buffers, lr, momentum, dampening, weight_decay, nesterov, maximize, is_first_step,
            grad_scale, found_inf, kMeta);
      });
  m.impl("multi_tensor_unscale_", [](at::TensorList grads, const at::Tensor& scale, const at::Tensor& found_inf) {
    unscale(grads, scale, found_inf, kMeta);
  });
  m.impl("multi_tensor_norm", [](at::TensorList tensors) { return norm(tensors, kMeta); });
  m.impl("multi_tensor_clip_grad_norm_",
         [](at::TensorList grads, double max_norm) { return clip_grad_norm(grads, max_norm, kMeta); });
}

}  // namespace torch_fastdet::multi_tensor
