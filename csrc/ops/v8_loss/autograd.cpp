// Autograd of the v8 detection loss: the forward pass keeps which anchor got which target with which score, the
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

struct V8Loss : torch::autograd::Function<V8Loss> {
  static variable_list forward(AutogradContext* context, at::TensorList heads, const at::Tensor& targets,
                               const at::Tensor& settings, const Levels& levels,
                               const std::optional<at::Tensor>& num_targets,
                               const std::optional<at::Tensor>& class_weights, const Options& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, items, scales, slot_anchor, slot_row, slot_score, status] =
        call(heads, targets, settings, levels, num_targets, class_weights, options);
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

  static variable_list backward(AutogradContext* context, variable_list gradients) {
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
    // targets, settings, the levels, num_targets, class_weights and the options have no gradient.
    result.resize(result.size() + 6);
    return result;
  }
};

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

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("v8_loss", unpack<&v8_loss_autograd>);
  m.impl("v8_loss_backward", unpack<&v8_loss_backward_autograd>);
}

}  // namespace torch_fastdet::v8_loss_autograd
