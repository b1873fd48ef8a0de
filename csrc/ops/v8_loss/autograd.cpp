// Autograd of the v8 losses: the forward pass keeps which anchor got which target with which score, the
// backward pass reads the logits again and writes each head's gradient, already multiplied by the incoming one.
#include "ops/common/autograd.h"
#include "ops/v8_loss/run.h"

namespace torch_fastdet::v8_loss_autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Levels = V8LevelsOn<Meta>::Types;
using Options = V8LossOptions::Types;
using State = V8LossTensors::Types;

V8LossResult call(at::TensorList heads, const at::Tensor& targets, const at::Tensor& settings, const Levels& levels,
                  const std::optional<at::Tensor>& num_targets, const std::optional<at::Tensor>& class_weights,
                  const Options& options) {
  static const auto op = find_operator<unpacked_signature<&v8_loss<Meta>>>("v8_loss");
  const auto& [strides, sizes] = levels;
  const auto& [reg_max, topk, topk2] = options;
  return op.call(heads, targets, settings, strides, sizes, num_targets, class_weights, reg_max, topk, topk2);
}

std::vector<at::Tensor> call_backward(const at::Tensor& grad, at::TensorList heads, const at::Tensor& targets,
                                      const State& state, const Levels& levels,
                                      const std::optional<at::Tensor>& class_weights, int64_t reg_max) {
  static const auto op = find_operator<unpacked_signature<&v8_loss_backward<Meta>>>("v8_loss_backward");
  return std::apply([&](const auto&... each) { return op.call(grad, heads, targets, each..., class_weights, reg_max); },
                    std::tuple_cat(state, levels));
}

// Keeps what the backward passes of both losses of heads read.
variable_list keep_heads(AutogradContext* context, at::TensorList heads, const at::Tensor& targets,
                         const Levels& levels, const std::optional<at::Tensor>& class_weights, const Options& options,
                         V8LossResult result) {
  auto& [loss, items, scales, slot_anchor, slot_row, slot_score, status] = result;
  variable_list saved{targets, scales, slot_anchor, slot_row, slot_score, class_weights.value_or(at::Tensor())};
  saved.insert(saved.end(), heads.begin(), heads.end());
  context->save_for_backward(std::move(saved));
  context->mark_non_differentiable({items, scales, slot_anchor, slot_row, slot_score, status});
  context->set_materialize_grads(false);  // else autograd would fill a zero tensor for each of these
  const auto& [strides, sizes] = levels;
  context->saved_data["strides"] = strides.vec();
  context->saved_data["sizes"] = c10::IValue(sizes);
  context->saved_data["reg_max"] = options_from<V8LossOptions>(options).reg_max;
  return {loss, items, scales, slot_anchor, slot_row, slot_score, status};
}

// The heads' gradients, and nothing for the `others` arguments.
variable_list head_gradients(AutogradContext* context, const variable_list& gradients, size_t others) {
  const auto saved = context->get_saved_variables();
  const at::TensorList heads(saved.data() + 6, saved.size() - 6);
  variable_list result(heads.size());
  if (gradients[0].defined()) {
    std::optional<at::Tensor> class_weights;
    if (saved[5].defined()) class_weights = saved[5];
    const auto strides = context->saved_data["strides"].toDoubleVector();
    const auto sizes = context->saved_data["sizes"].toSymIntVector();
    result = call_backward(gradients[0], heads, saved[0], {saved[1], saved[2], saved[3], saved[4]}, {strides, sizes},
                           class_weights, context->saved_data["reg_max"].toInt());
  }
  result.resize(result.size() + others);
  return result;
}

struct V8Loss : torch::autograd::Function<V8Loss> {
  static variable_list forward(AutogradContext* context, at::TensorList heads, const at::Tensor& targets,
                               const at::Tensor& settings, const Levels& levels,
                               const std::optional<at::Tensor>& num_targets,
                               const std::optional<at::Tensor>& class_weights, const Options& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return keep_heads(context, heads, targets, levels, class_weights, options,
                      call(heads, targets, settings, levels, num_targets, class_weights, options));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return head_gradients(context, gradients, 6);
  }
};

using MaskInputs = V8MaskInputs::Types;

struct V8MaskedLoss : torch::autograd::Function<V8MaskedLoss> {
  static variable_list forward(AutogradContext* context, at::TensorList heads, const MaskInputs& inputs,
                               const at::Tensor& targets, const at::Tensor& settings, const Levels& levels,
                               const std::optional<at::Tensor>& num_targets,
                               const std::optional<at::Tensor>& class_weights, const Options& options, bool overlap) {
    static const auto op = find_operator<unpacked_signature<&v8_masked_loss<Meta>>>("v8_masked_loss");
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto& [coefficients, protos, masks] = inputs;
    const auto& [strides, sizes] = levels;
    const auto& [reg_max, topk, topk2] = options;
    return keep_heads(context, heads, targets, levels, class_weights, options,
                      op.call(heads, coefficients, protos, masks, targets, settings, strides, sizes, num_targets,
                              class_weights, reg_max, topk, topk2, overlap));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return head_gradients(context, gradients, 8);
  }
};

using PoseInputs = V8PoseInputs::Types;

struct V8PosedLoss : torch::autograd::Function<V8PosedLoss> {
  static variable_list forward(AutogradContext* context, at::TensorList heads, const PoseInputs& inputs,
                               const at::Tensor& targets, const at::Tensor& settings, const Levels& levels,
                               const std::optional<at::Tensor>& num_targets,
                               const std::optional<at::Tensor>& class_weights, const Options& options) {
    static const auto op = find_operator<unpacked_signature<&v8_posed_loss<Meta>>>("v8_posed_loss");
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto& [predictions, labels, sigmas] = inputs;
    const auto& [strides, sizes] = levels;
    const auto& [reg_max, topk, topk2] = options;
    return keep_heads(context, heads, targets, levels, class_weights, options,
                      op.call(heads, predictions, labels, sigmas, targets, settings, strides, sizes, num_targets,
                              class_weights, reg_max, topk, topk2));
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return head_gradients(context, gradients, 7);
  }
};

V8LossResult v8_posed_loss_autograd(at::TensorList heads, const PoseInputs& inputs, const at::Tensor& targets,
                                    const at::Tensor& settings, const Levels& levels,
                                    const std::optional<at::Tensor>& num_targets,
                                    const std::optional<at::Tensor>& class_weights, const Options& options) {
  auto result = V8PosedLoss::apply(heads, inputs, targets, settings, levels, num_targets, class_weights, options);
  return {result[0], result[1], result[2], result[3], result[4], result[5], result[6]};
}

V8LossResult v8_masked_loss_autograd(at::TensorList heads, const MaskInputs& inputs, const at::Tensor& targets,
                                     const at::Tensor& settings, const Levels& levels,
                                     const std::optional<at::Tensor>& num_targets,
                                     const std::optional<at::Tensor>& class_weights, const Options& options,
                                     bool overlap) {
  auto result =
      V8MaskedLoss::apply(heads, inputs, targets, settings, levels, num_targets, class_weights, options, overlap);
  return {result[0], result[1], result[2], result[3], result[4], result[5], result[6]};
}

V8LossResult v8_loss_autograd(at::TensorList heads, const at::Tensor& targets, const at::Tensor& settings,
                              const Levels& levels, const std::optional<at::Tensor>& num_targets,
                              const std::optional<at::Tensor>& class_weights, const Options& options) {
  auto result = V8Loss::apply(heads, targets, settings, levels, num_targets, class_weights, options);
  return {result[0], result[1], result[2], result[3], result[4], result[5], result[6]};
}

std::vector<at::Tensor> v8_loss_backward_autograd(const at::Tensor& grad, at::TensorList heads,
                                                  const at::Tensor& targets, const State& state, const Levels& levels,
                                                  const std::optional<at::Tensor>& class_weights, int64_t reg_max) {
  variable_list inputs{grad};
  inputs.insert(inputs.end(), heads.begin(), heads.end());
  return without_second_gradient(
      inputs, [&] { return call_backward(grad, heads, targets, state, levels, class_weights, reg_max); },
      "v8_loss: a second derivative was asked for, but it has a first derivative only; "
      "use Ultralytics' own v8DetectionLoss where a gradient of a gradient is needed");
}

using ImageSize = V8SymInts<Meta>;
using MaskState = V8MaskTensors::Types;

V8MaskLossResult call_masks(const at::Tensor& coefficients, const at::Tensor& protos, const at::Tensor& masks,
                            const at::Tensor& targets, const at::Tensor& settings, const at::Tensor& slot_anchor,
                            const at::Tensor& slot_row, ImageSize image_size,
                            const std::optional<at::Tensor>& num_targets, bool overlap) {
  static const auto op = find_operator<std::remove_pointer_t<decltype(&v8_mask_loss<Meta>)>>("v8_mask_loss");
  return op.call(coefficients, protos, masks, targets, settings, slot_anchor, slot_row, image_size, num_targets,
                 overlap);
}

std::tuple<at::Tensor, at::Tensor> call_masks_backward(const at::Tensor& grad, const at::Tensor& coefficients,
                                                       const at::Tensor& protos, const at::Tensor& masks,
                                                       const MaskState& state, bool overlap, bool shared,
                                                       std::array<bool, 2> output_mask) {
  static const auto op = find_operator<unpacked_signature<&v8_mask_loss_backward<Meta>>>("v8_mask_loss_backward");
  return std::apply(
      [&](const auto&... each) {
        return op.call(grad, coefficients, protos, masks, each..., overlap, shared, output_mask);
      },
      state);
}

// Keeps what both losses' backward passes read. `shared`: several positives may be of one anchor.
variable_list keep_masks(AutogradContext* context, const at::Tensor& coefficients, const at::Tensor& protos,
                         const at::Tensor& masks, V8MaskLossResult result, bool overlap, bool shared) {
  auto& [loss, item, scale, positives, first, unit] = result;
  context->save_for_backward({coefficients, protos, masks, scale, positives, first, unit});
  context->mark_non_differentiable({item, scale, positives, first, unit});
  context->set_materialize_grads(false);
  context->saved_data["overlap"] = overlap;
  context->saved_data["shared"] = shared;
  return {loss, item, scale, positives, first, unit};
}

variable_list mask_gradients(AutogradContext* context, const variable_list& gradients, size_t arguments) {
  const auto saved = context->get_saved_variables();
  variable_list result(arguments);
  if (gradients[0].defined()) {
    std::tie(result[0], result[1]) =
        call_masks_backward(gradients[0], saved[0], saved[1], saved[2], {saved[3], saved[4], saved[5], saved[6]},
                            context->saved_data["overlap"].toBool(), context->saved_data["shared"].toBool(),
                            {context->needs_input_grad(0), context->needs_input_grad(1)});
  }
  return result;
}

struct V8MaskLoss : torch::autograd::Function<V8MaskLoss> {
  static variable_list forward(AutogradContext* context, const at::Tensor& coefficients, const at::Tensor& protos,
                               const at::Tensor& masks, const at::Tensor& targets, const at::Tensor& settings,
                               const at::Tensor& slot_anchor, const at::Tensor& slot_row, ImageSize image_size,
                               const std::optional<at::Tensor>& num_targets, bool overlap) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return keep_masks(context, coefficients, protos, masks,
                      call_masks(coefficients, protos, masks, targets, settings, slot_anchor, slot_row, image_size,
                                 num_targets, overlap),
                      overlap, false);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return mask_gradients(context, gradients, 10);
  }
};

struct Yolov5MaskLoss : torch::autograd::Function<Yolov5MaskLoss> {
  static variable_list forward(AutogradContext* context, const at::Tensor& coefficients, const at::Tensor& protos,
                               const at::Tensor& masks, const at::Tensor& targets, const at::Tensor& match_cell,
                               ImageSize sizes, const std::optional<at::Tensor>& num_targets, double box_gain,
                               bool overlap) {
    static const auto op = find_operator<std::remove_pointer_t<decltype(&yolov5_mask_loss<Meta>)>>("yolov5_mask_loss");
    at::AutoDispatchBelowADInplaceOrView guard;
    return keep_masks(context, coefficients, protos, masks,
                      op.call(coefficients, protos, masks, targets, match_cell, sizes, num_targets, box_gain, overlap),
                      overlap, true);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return mask_gradients(context, gradients, 9);
  }
};

V8MaskLossResult yolov5_mask_loss_autograd(const at::Tensor& coefficients, const at::Tensor& protos,
                                           const at::Tensor& masks, const at::Tensor& targets,
                                           const at::Tensor& match_cell, ImageSize sizes,
                                           const std::optional<at::Tensor>& num_targets, double box_gain,
                                           bool overlap) {
  auto result =
      Yolov5MaskLoss::apply(coefficients, protos, masks, targets, match_cell, sizes, num_targets, box_gain, overlap);
  return {result[0], result[1], result[2], result[3], result[4], result[5]};
}

V8MaskLossResult v8_mask_loss_autograd(const at::Tensor& coefficients, const at::Tensor& protos,
                                       const at::Tensor& masks, const at::Tensor& targets, const at::Tensor& settings,
                                       const at::Tensor& slot_anchor, const at::Tensor& slot_row, ImageSize image_size,
                                       const std::optional<at::Tensor>& num_targets, bool overlap) {
  auto result = V8MaskLoss::apply(coefficients, protos, masks, targets, settings, slot_anchor, slot_row, image_size,
                                  num_targets, overlap);
  return {result[0], result[1], result[2], result[3], result[4], result[5]};
}

std::tuple<at::Tensor, at::Tensor> v8_mask_loss_backward_autograd(const at::Tensor& grad,
                                                                  const at::Tensor& coefficients,
                                                                  const at::Tensor& protos, const at::Tensor& masks,
                                                                  const MaskState& state, bool overlap, bool shared,
                                                                  std::array<bool, 2> output_mask) {
  const auto result = without_second_gradient(
      {grad, coefficients, protos},
      [&]() -> std::vector<at::Tensor> {
        const auto [first, second] =
            call_masks_backward(grad, coefficients, protos, masks, state, overlap, shared, output_mask);
        std::vector<at::Tensor> wanted;  // autograd takes no undefined ones
        if (output_mask[0]) wanted.push_back(first);
        if (output_mask[1]) wanted.push_back(second);
        return wanted;
      },
      "v8_mask_loss: a second derivative was asked for, but it has a first derivative only; "
      "use the stock loss where a gradient of a gradient is needed");
  return {output_mask[0] ? result[0] : at::Tensor(), output_mask[1] ? result.back() : at::Tensor()};
}

using Labels = V8KeypointLabels::Types;

V8KeypointLossResult call_keypoints(const at::Tensor& predictions, const Labels& labels, const at::Tensor& gains,
                                    const at::Tensor& settings, const Levels& levels, bool centered) {
  static const auto op = find_operator<unpacked_signature<&v8_keypoint_loss<Meta>>>("v8_keypoint_loss");
  const auto& [strides, sizes] = levels;
  return std::apply([&, &s = strides, &z = sizes](
                        const auto&... each) { return op.call(predictions, each..., gains, settings, s, z, centered); },
                    labels);
}

at::Tensor call_keypoints_backward(const at::Tensor& grad, const at::Tensor& predictions, const Labels& labels,
                                   const at::Tensor& scales, const Levels& levels, bool centered) {
  static const auto op =
      find_operator<unpacked_signature<&v8_keypoint_loss_backward<Meta>>>("v8_keypoint_loss_backward");
  const auto& [strides, sizes] = levels;
  return std::apply([&, &s = strides, &z = sizes](
                        const auto&... each) { return op.call(grad, predictions, each..., scales, s, z, centered); },
                    labels);
}

struct V8KeypointLoss : torch::autograd::Function<V8KeypointLoss> {
  static variable_list forward(AutogradContext* context, const at::Tensor& predictions, const Labels& labels,
                               const at::Tensor& gains, const at::Tensor& settings, const Levels& levels,
                               bool centered) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, items, scales] = call_keypoints(predictions, labels, gains, settings, levels, centered);
    context->saved_data["centered"] = centered;
    const auto& [keypoints, sigmas, targets, slot_anchor, slot_row] = labels;
    context->save_for_backward({predictions, keypoints, sigmas, targets, slot_anchor, slot_row, scales});
    context->mark_non_differentiable({items, scales});
    context->set_materialize_grads(false);
    const auto& [strides, sizes] = levels;
    context->saved_data["strides"] = strides.vec();
    context->saved_data["sizes"] = c10::IValue(sizes);
    return {loss, items, scales};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    variable_list result(6);
    if (gradients[0].defined()) {
      const auto strides = context->saved_data["strides"].toDoubleVector();
      const auto sizes = context->saved_data["sizes"].toSymIntVector();
      result[0] = call_keypoints_backward(gradients[0], saved[0], {saved[1], saved[2], saved[3], saved[4], saved[5]},
                                          saved[6], {strides, sizes}, context->saved_data["centered"].toBool());
    }
    return result;
  }
};

V8KeypointLossResult v8_keypoint_loss_autograd(const at::Tensor& predictions, const Labels& labels,
                                               const at::Tensor& gains, const at::Tensor& settings,
                                               const Levels& levels, bool centered) {
  auto result = V8KeypointLoss::apply(predictions, labels, gains, settings, levels, centered);
  return {result[0], result[1], result[2]};
}

at::Tensor v8_keypoint_loss_backward_autograd(const at::Tensor& grad, const at::Tensor& predictions,
                                              const Labels& labels, const at::Tensor& scales, const Levels& levels,
                                              bool centered) {
  return without_second_gradient(
      {grad, predictions},
      [&]() -> std::vector<at::Tensor> {
        return {call_keypoints_backward(grad, predictions, labels, scales, levels, centered)};
      },
      "v8_keypoint_loss: a second derivative was asked for, but it has a first derivative only; "
      "use Ultralytics' own v8PoseLoss where a gradient of a gradient is needed")[0];
}

using Outputs = V8ObbOutputs::Types;

V8LossResult call_obb(const Outputs& outputs, const at::Tensor& targets, const at::Tensor& settings,
                      const Levels& levels, const std::optional<at::Tensor>& num_targets,
                      const std::optional<at::Tensor>& class_weights, const Options& options) {
  static const auto op = find_operator<unpacked_signature<&v8_obb_loss<Meta>>>("v8_obb_loss");
  const auto& [boxes, scores, angles] = outputs;
  const auto& [strides, sizes] = levels;
  const auto& [reg_max, topk, topk2] = options;
  return op.call(boxes, scores, angles, targets, settings, strides, sizes, num_targets, class_weights, reg_max, topk,
                 topk2);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> call_obb_backward(const at::Tensor& grad, const Outputs& outputs,
                                                                 const at::Tensor& targets, const State& state,
                                                                 const Levels& levels,
                                                                 const std::optional<at::Tensor>& class_weights,
                                                                 int64_t reg_max) {
  static const auto op = find_operator<unpacked_signature<&v8_obb_loss_backward<Meta>>>("v8_obb_loss_backward");
  const auto& [boxes, scores, angles] = outputs;
  return std::apply(
      [&, &b = boxes, &s = scores, &a = angles](const auto&... each) {
        return op.call(grad, b, s, a, targets, each..., class_weights, reg_max);
      },
      std::tuple_cat(state, levels));
}

struct V8ObbLoss : torch::autograd::Function<V8ObbLoss> {
  static variable_list forward(AutogradContext* context, const at::Tensor& boxes, const at::Tensor& scores,
                               const at::Tensor& angles, const at::Tensor& targets, const at::Tensor& settings,
                               const Levels& levels, const std::optional<at::Tensor>& num_targets,
                               const std::optional<at::Tensor>& class_weights, const Options& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, items, scales, slot_anchor, slot_row, slot_score, status] =
        call_obb({boxes, scores, angles}, targets, settings, levels, num_targets, class_weights, options);
    context->save_for_backward({boxes, scores, angles, targets, scales, slot_anchor, slot_row, slot_score,
                                class_weights.value_or(at::Tensor())});
    context->mark_non_differentiable({items, scales, slot_anchor, slot_row, slot_score, status});
    context->set_materialize_grads(false);
    const auto& [strides, sizes] = levels;
    context->saved_data["strides"] = strides.vec();
    context->saved_data["sizes"] = c10::IValue(sizes);
    context->saved_data["reg_max"] = options_from<V8LossOptions>(options).reg_max;
    return {loss, items, scales, slot_anchor, slot_row, slot_score, status};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    variable_list result(9);
    if (gradients[0].defined()) {
      std::optional<at::Tensor> class_weights;
      if (saved[8].defined()) class_weights = saved[8];
      const auto strides = context->saved_data["strides"].toDoubleVector();
      const auto sizes = context->saved_data["sizes"].toSymIntVector();
      std::tie(result[0], result[1], result[2]) = call_obb_backward(
          gradients[0], {saved[0], saved[1], saved[2]}, saved[3], {saved[4], saved[5], saved[6], saved[7]},
          {strides, sizes}, class_weights, context->saved_data["reg_max"].toInt());
    }
    return result;
  }
};

V8LossResult v8_obb_loss_autograd(const Outputs& outputs, const at::Tensor& targets, const at::Tensor& settings,
                                  const Levels& levels, const std::optional<at::Tensor>& num_targets,
                                  const std::optional<at::Tensor>& class_weights, const Options& options) {
  const auto& [boxes, scores, angles] = outputs;
  auto result = V8ObbLoss::apply(boxes, scores, angles, targets, settings, levels, num_targets, class_weights, options);
  return {result[0], result[1], result[2], result[3], result[4], result[5], result[6]};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> v8_obb_loss_backward_autograd(
    const at::Tensor& grad, const Outputs& outputs, const at::Tensor& targets, const State& state, const Levels& levels,
    const std::optional<at::Tensor>& class_weights, int64_t reg_max) {
  const auto& [boxes, scores, angles] = outputs;
  const auto result = without_second_gradient(
      {grad, boxes, scores, angles},
      [&]() -> std::vector<at::Tensor> {
        auto [first, second, third] = call_obb_backward(grad, outputs, targets, state, levels, class_weights, reg_max);
        return {first, second, third};
      },
      "v8_obb_loss: a second derivative was asked for, but it has a first derivative only; "
      "use Ultralytics' own v8OBBLoss where a gradient of a gradient is needed");
  return {result[0], result[1], result[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("v8_loss", unpack<&v8_loss_autograd>);
  m.impl("v8_loss_backward", unpack<&v8_loss_backward_autograd>);
  m.impl("v8_masked_loss", unpack<&v8_masked_loss_autograd>);
  m.impl("v8_posed_loss", unpack<&v8_posed_loss_autograd>);
  m.impl("v8_mask_loss", TORCH_FN(v8_mask_loss_autograd));
  m.impl("yolov5_mask_loss", TORCH_FN(yolov5_mask_loss_autograd));
  m.impl("v8_mask_loss_backward", unpack<&v8_mask_loss_backward_autograd>);
  m.impl("v8_obb_loss", unpack<&v8_obb_loss_autograd>);
  m.impl("v8_obb_loss_backward", unpack<&v8_obb_loss_backward_autograd>);
  m.impl("v8_keypoint_loss", unpack<&v8_keypoint_loss_autograd>);
  m.impl("v8_keypoint_loss_backward", unpack<&v8_keypoint_loss_backward_autograd>);
}

}  // namespace torch_fastdet::v8_loss_autograd
