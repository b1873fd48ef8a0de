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
using Outputs = V8ObbOutputs::Types;

std::vector<at::Tensor> call_backward(const at::Tensor& grad, at::TensorList heads, const at::Tensor& targets,
                                      const State& state, const Levels& levels,
                                      const std::optional<at::Tensor>& class_weights, int64_t reg_max) {
  static const auto op = find_operator<unpacked_signature<&v8_loss_backward<Meta>>>("v8_loss_backward");
  return std::apply([&](const auto&... each) { return op.call(grad, heads, targets, each..., class_weights, reg_max); },
                    std::tuple_cat(state, levels));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> call_obb_backward(const at::Tensor& grad, const Outputs& outputs,
                                                                 const at::Tensor& targets, const State& state,
                                                                 const Levels& levels,
                                                                 const std::optional<at::Tensor>& class_weights,
                                                                 int64_t reg_max) {
  static const auto op = find_operator<unpacked_signature<&v8_obb_loss_backward<Meta>>>("v8_obb_loss_backward");
  const auto call = [&](const auto&... each) { return op.call(grad, each...); };
  return std::apply(call, std::tuple_cat(outputs, std::tie(targets), state, levels, std::tie(class_weights, reg_max)));
}

void save_levels(AutogradContext* context, const Levels& levels) {
  const auto& [strides, sizes] = levels;
  context->saved_data["strides"] = strides.vec();
  context->saved_data["sizes"] = c10::IValue(sizes);
}

std::pair<std::vector<double>, std::vector<c10::SymInt>> saved_levels(AutogradContext* context) {
  return {context->saved_data["strides"].toDoubleVector(), context->saved_data["sizes"].toSymIntVector()};
}

// What tells the losses that HeadLoss computes apart: the operator, how it takes the heads, what it takes between them
// and the targets (Inputs) and behind the options (Rest), and the heads' gradients.
struct Upright {
  static auto unpacked(at::TensorList heads) { return std::make_tuple(heads); }
  static std::vector<at::Tensor> gradients(const at::Tensor& grad, at::TensorList heads, const at::Tensor& targets,
                                           const State& state, const Levels& levels,
                                           const std::optional<at::Tensor>& class_weights, int64_t reg_max) {
    return call_backward(grad, heads, targets, state, levels, class_weights, reg_max);
  }
};

struct Detection : Upright {
  static constexpr auto kName = "v8_loss";
  static constexpr auto kLoss = &v8_loss<Meta>;
  using Inputs = std::tuple<>;
  using Rest = std::tuple<>;
};

struct Masked : Upright {
  static constexpr auto kName = "v8_masked_loss";
  static constexpr auto kLoss = &v8_masked_loss<Meta>;
  using Inputs = V8MaskInputs::Types;
  using Rest = std::tuple<bool>;  // overlap
};

struct Posed : Upright {
  static constexpr auto kName = "v8_posed_loss";
  static constexpr auto kLoss = &v8_posed_loss<Meta>;
  using Inputs = V8PoseInputs::Types;
  using Rest = std::tuple<>;
};

// The heads are boxes, scores and angles.
struct Rotated {
  static constexpr auto kName = "v8_obb_loss";
  static constexpr auto kLoss = &v8_obb_loss<Meta>;
  using Inputs = std::tuple<>;
  using Rest = std::tuple<>;
  static auto unpacked(at::TensorList heads) { return std::tie(heads[0], heads[1], heads[2]); }
  static std::vector<at::Tensor> gradients(const at::Tensor& grad, at::TensorList heads, const at::Tensor& targets,
                                           const State& state, const Levels& levels,
                                           const std::optional<at::Tensor>& class_weights, int64_t reg_max) {
    auto [boxes, scores, angles] =
        call_obb_backward(grad, unpacked(heads), targets, state, levels, class_weights, reg_max);
    return {boxes, scores, angles};
  }
};

template <class Task>
struct HeadLoss : torch::autograd::Function<HeadLoss<Task>> {
  static variable_list forward(AutogradContext* context, at::TensorList heads, const typename Task::Inputs& inputs,
                               const at::Tensor& targets, const at::Tensor& settings, const Levels& levels,
                               const std::optional<at::Tensor>& num_targets,
                               const std::optional<at::Tensor>& class_weights, const Options& options,
                               const typename Task::Rest& rest) {
    static const auto op = find_operator<unpacked_signature<Task::kLoss>>(Task::kName);
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, items, scales, slot_anchor, slot_row, slot_score, status] =
        std::apply([&](const auto&... each) { return op.call(each...); },
                   std::tuple_cat(Task::unpacked(heads), inputs, std::tie(targets, settings), levels,
                                  std::tie(num_targets, class_weights), options, rest));
    variable_list saved{targets, scales, slot_anchor, slot_row, slot_score, class_weights.value_or(at::Tensor())};
    saved.insert(saved.end(), heads.begin(), heads.end());
    context->save_for_backward(std::move(saved));
    context->mark_non_differentiable({items, scales, slot_anchor, slot_row, slot_score, status});
    context->set_materialize_grads(false);  // else autograd would fill a zero tensor for each of these
    save_levels(context, levels);
    context->saved_data["reg_max"] = options_from<V8LossOptions>(options).reg_max;
    return {loss, items, scales, slot_anchor, slot_row, slot_score, status};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::TensorList heads(saved.data() + 6, saved.size() - 6);
    variable_list result(heads.size());
    if (gradients[0].defined()) {
      std::optional<at::Tensor> class_weights;
      if (saved[5].defined()) class_weights = saved[5];
      const auto [strides, sizes] = saved_levels(context);
      result = Task::gradients(gradients[0], heads, saved[0], {saved[1], saved[2], saved[3], saved[4]},
                               {strides, sizes}, class_weights, context->saved_data["reg_max"].toInt());
    }
    result.resize(result.size() + 8);  // nothing for the arguments behind the heads
    return result;
  }
};

template <class Task>
V8LossResult head_loss(at::TensorList heads, const typename Task::Inputs& inputs, const at::Tensor& targets,
                       const at::Tensor& settings, const Levels& levels, const std::optional<at::Tensor>& num_targets,
                       const std::optional<at::Tensor>& class_weights, const Options& options,
                       const typename Task::Rest& rest) {
  auto result =
      HeadLoss<Task>::apply(heads, inputs, targets, settings, levels, num_targets, class_weights, options, rest);
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
    save_levels(context, levels);
    return {loss, items, scales};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    variable_list result(6);
    if (gradients[0].defined()) {
      const auto [strides, sizes] = saved_levels(context);
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

V8LossResult v8_obb_loss_autograd(const Outputs& outputs, const at::Tensor& targets, const at::Tensor& settings,
                                  const Levels& levels, const std::optional<at::Tensor>& num_targets,
                                  const std::optional<at::Tensor>& class_weights, const Options& options) {
  const auto& [boxes, scores, angles] = outputs;
  return head_loss<Rotated>({boxes, scores, angles}, {}, targets, settings, levels, num_targets, class_weights, options,
                            {});
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
  m.impl("v8_loss", unpack<&head_loss<Detection>>);
  m.impl("v8_loss_backward", unpack<&v8_loss_backward_autograd>);
  m.impl("v8_masked_loss", unpack<&head_loss<Masked>>);
  m.impl("v8_posed_loss", unpack<&head_loss<Posed>>);
  m.impl("v8_mask_loss", TORCH_FN(v8_mask_loss_autograd));
  m.impl("yolov5_mask_loss", TORCH_FN(yolov5_mask_loss_autograd));
  m.impl("v8_mask_loss_backward", unpack<&v8_mask_loss_backward_autograd>);
  m.impl("v8_obb_loss", unpack<&v8_obb_loss_autograd>);
  m.impl("v8_obb_loss_backward", unpack<&v8_obb_loss_backward_autograd>);
  m.impl("v8_keypoint_loss", unpack<&v8_keypoint_loss_autograd>);
  m.impl("v8_keypoint_loss_backward", unpack<&v8_keypoint_loss_backward_autograd>);
}

}  // namespace torch_fastdet::v8_loss_autograd
