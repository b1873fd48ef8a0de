// Run the v8 detection loss and its backward except Backend::run(params, op) of cpu.cpp and cuda.cpp;
// Backend::slot_blocks and class_blocks are the rows of partial sums that it needs.
#pragma once

#include "ops/v8_loss/keypoints.h"
#include "ops/v8_loss/masked.h"
#include "ops/v8_loss/obb.h"

namespace torch_fastdet {

template <class Backend>
V8LossResult v8_loss(at::TensorList heads, const V8LossArguments<V8Int<Backend>>& arguments) {
  constexpr auto op = "v8_loss";
  check_plain<Backend>(arguments.levels(), {arguments.targets}, heads,
                       [&](const V8Levels<>& plain) { check_v8_loss(heads, plain, arguments, op); });
  if constexpr (Backend::kMeta) {
    return empty_v8_loss(heads[0], arguments.targets, arguments.topk, 3);
  } else {
    return v8_run<Backend, core::V8LossParams>(heads, arguments, op, [](core::V8LossParams&, const at::Tensor&) {});
  }
}

template <class Backend>
std::vector<at::Tensor> v8_loss_backward(const at::Tensor& grad_loss, at::TensorList heads, const at::Tensor& targets,
                                         const V8LossTensors& state, const V8LevelsOn<Backend>& levels,
                                         const std::optional<at::Tensor>& class_weights, int64_t reg_max) {
  if constexpr (Backend::kMeta) {
    return empty_v8_gradients(heads);
  } else {
    check_v8_loss_backward(grad_loss, heads, targets, state, levels, class_weights, reg_max);
    const c10::DeviceGuard guard(heads[0].device());
    const auto rows = targets.contiguous();
    const auto weights = v8_class_weights(class_weights, heads[0]);
    auto gradients = empty_v8_gradients(heads);
    core::V8LossBackwardParams params{};
    params.heads = v8_heads(heads, gradients, levels, reg_max);
    v8_fill_backward(params, grad_loss, rows, state, weights);
    Backend::run(params, "v8_loss_backward");
    return gradients;
  }
}

template <class Backend>
void register_v8_loss(torch::Library& m) {
  m.impl("v8_loss", unpack<&v8_loss<Backend>>);
  m.impl("v8_loss_backward", unpack<&v8_loss_backward<Backend>>);
  register_v8_mask_loss<Backend>(m);
  register_v8_masked_loss<Backend>(m);
  register_v8_keypoint_loss<Backend>(m);
  register_v8_obb_loss<Backend>(m);
}

}  // namespace torch_fastdet
