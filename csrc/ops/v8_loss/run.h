// The v8 detection loss and its backward, except the arithmetic: check, allocate, fill in the parameters, and hand them
// to Backend::run(params), which cpu.cpp and cuda.cpp each define. Backend::slot_blocks and class_blocks are the rows
// of partial sums that it wants. On Meta there is nothing to run.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <type_traits>
#include <vector>

#include "ops/common/backend.h"
#include "ops/common/options.h"
#include "ops/v8_loss/checks.h"
#include "ops/v8_loss/keypoints.h"
#include "ops/v8_loss/masked.h"
#include "ops/v8_loss/masks.h"
#include "ops/v8_loss/obb.h"
#include "ops/v8_loss/scratch.h"

namespace torch_fastdet {

template <class Backend>
V8LossResult v8_loss(at::TensorList heads, const at::Tensor& targets, const at::Tensor& settings,
                     const V8LevelsOn<Backend>& levels, const std::optional<at::Tensor>& num_targets,
                     const std::optional<at::Tensor>& class_weights, const V8LossOptions& options) {
  check_plain<Backend>(levels, {targets}, heads, [&](const V8Levels<>& plain) {
    check_v8_loss(heads, targets, settings, plain, num_targets, class_weights, options);
  });
  if constexpr (Backend::kMeta) {
    return empty_v8_loss(heads[0], targets, options.topk, 3);
  } else {
    const c10::DeviceGuard guard(heads[0].device());
    return v8_run<Backend, core::V8LossParams>(heads, targets, settings, levels, num_targets, class_weights, options,
                                               [](core::V8LossParams&, const at::Tensor&) {});
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
    Backend::run(params);
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
