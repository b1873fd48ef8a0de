// Run the loss of oriented boxes, as run.h does for detection, with angles as a third tensor of raw outputs.
#pragma once

#include "core/v8_loss/v8_obb_loss.h"
#include "ops/v8_loss/scratch.h"

namespace torch_fastdet {

// Hold raw outputs of all levels: (bs, 4 * reg_max, anchors), (bs, classes, anchors), (bs, 1, anchors).
struct V8ObbOutputs {
  const at::Tensor &boxes, &scores, &angles;
  using Types = std::tuple<const at::Tensor&, const at::Tensor&, const at::Tensor&>;
};

inline void check_v8_obb_outputs(const V8ObbOutputs& outputs, const V8Levels<>& levels, int64_t reg_max,
                                 const char* op) {
  const auto& [boxes, scores, angles] = outputs;
  TORCH_CHECK(boxes.dim() == 3 && scores.dim() == 3, op, ": boxes has shape ", boxes.sizes(), " and scores ",
              scores.sizes(), ", but three dimensions are expected of both");
  check_v8_heads({boxes, scores}, levels, reg_max, op);
  check_strided(angles, op, "angles");
  TORCH_CHECK(angles.scalar_type() == boxes.scalar_type() && angles.dim() == 3 && angles.size(0) == boxes.size(0) &&
                  angles.size(1) == 1 && angles.size(2) == boxes.size(2),
              op, ": angles is ", dtype_name(angles.scalar_type()), " of shape ", angles.sizes(), ", but ",
              dtype_name(boxes.scalar_type()), " of shape (", boxes.size(0), ", 1, ", boxes.size(2), ") is expected");
  check_same_device(boxes, "boxes", angles, op, "angles");
}

inline core::V8Angles v8_angles(const at::Tensor& angles, const at::Tensor& gradient) {
  core::V8Angles result{angles.const_data_ptr(), angles.stride(0), angles.stride(2), nullptr, 0, 0};
  if (gradient.defined()) {
    result.gradient = gradient.mutable_data_ptr();
    result.gradient_b = gradient.stride(0);
    result.gradient_a = gradient.stride(2);
  }
  return result;
}

template <class Backend>
V8LossResult v8_obb_loss(const V8ObbOutputs& outputs, const V8LossArguments<V8Int<Backend>>& arguments) {
  constexpr auto op = "v8_obb_loss";
  const auto& [boxes, scores, angles] = outputs;
  check_plain<Backend>(arguments.levels(), {arguments.targets, boxes, scores, angles}, {},
                       [&](const V8Levels<>& plain) { check_v8_obb_outputs(outputs, plain, arguments.reg_max, op); });
  if constexpr (Backend::kMeta) {
    return empty_v8_loss(boxes, arguments.targets, arguments.topk, core::kV8ObbParts);
  } else {
    check_v8_arguments(boxes, "boxes", scores.size(1), arguments, op, core::kV8ObbColumns, core::kV8ObbSettings);
    const auto fill = [&](core::V8ObbLossParams& params, const at::Tensor&) {
      params.angles = v8_angles(outputs.angles, {});
    };
    return v8_run<Backend, core::V8ObbLossParams>({boxes, scores}, arguments, op, fill, core::kV8ObbParts,
                                                  core::kV8ObbTerms);
  }
}

template <class Backend>
std::tuple<at::Tensor, at::Tensor, at::Tensor> v8_obb_loss_backward(
    const at::Tensor& grad_loss, const V8ObbOutputs& outputs, const at::Tensor& targets, const V8LossTensors& state,
    const V8LevelsOn<Backend>& levels, const std::optional<at::Tensor>& class_weights, int64_t reg_max) {
  constexpr auto op = "v8_obb_loss_backward";
  const auto& [boxes, scores, angles] = outputs;
  const auto gradients = empty_v8_gradients({boxes, scores, angles});
  if constexpr (!Backend::kMeta) {
    check_v8_obb_outputs(outputs, levels, reg_max, op);
    check_v8_state(grad_loss, boxes, "boxes", targets, state, op, core::kV8ObbParts, core::kV8ObbColumns);
    check_v8_class_weights(boxes, class_weights, scores.size(1), op);
    const c10::DeviceGuard guard(boxes.device());
    const auto rows = targets.contiguous();
    const auto weights = v8_class_weights(class_weights, boxes);
    core::V8ObbLossBackwardParams params{};
    params.heads = v8_heads({boxes, scores}, {gradients[0], gradients[1]}, levels, reg_max);
    params.angles = v8_angles(angles, gradients[2]);
    v8_fill_backward(params, grad_loss, rows, state, weights);
    Backend::run(params, op);
  }
  return {gradients[0], gradients[1], gradients[2]};
}

template <class Backend>
void register_v8_obb_loss(torch::Library& m) {
  m.impl("v8_obb_loss", unpack<&v8_obb_loss<Backend>>);
  m.impl("v8_obb_loss_backward", unpack<&v8_obb_loss_backward<Backend>>);
}

}  // namespace torch_fastdet
