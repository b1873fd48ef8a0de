// Autograd of the v8 detection loss: the forward pass keeps which anchor got which target with which score, the
// backward pass reads the logits again and writes each head's gradient, already multiplied by the incoming one.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops/common/autograd.h"
#include "ops/v8_loss/checks.h"

namespace torch_fastdet {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Forward = V8LossResult(at::TensorList, const at::Tensor&, const at::Tensor&, at::ArrayRef<double>,
                             c10::SymIntArrayRef, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                             int64_t, int64_t, int64_t);
using Backward = std::vector<at::Tensor>(const at::Tensor&, at::TensorList, const at::Tensor&, const at::Tensor&,
                                         const at::Tensor&, const at::Tensor&, const at::Tensor&, at::ArrayRef<double>,
                                         c10::SymIntArrayRef, const std::optional<at::Tensor>&, int64_t);

const c10::TypedOperatorHandle<Backward>& backward_operator() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("torch_fastdet::v8_loss_backward", "").typed<Backward>();
  return op;
}

struct V8Loss : torch::autograd::Function<V8Loss> {
  static variable_list forward(AutogradContext* context, at::TensorList heads, const at::Tensor& targets,
                               const at::Tensor& settings, at::ArrayRef<double> strides, c10::SymIntArrayRef sizes,
                               const std::optional<at::Tensor>& num_targets,
                               const std::optional<at::Tensor>& class_weights, int64_t reg_max, int64_t topk,
                               int64_t topk2) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("torch_fastdet::v8_loss", "").typed<Forward>();
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, items, scales, slot_anchor, slot_row, slot_score, status] =
        op.call(heads, targets, settings, strides, sizes, num_targets, class_weights, reg_max, topk, topk2);
    variable_list saved{targets, scales, slot_anchor, slot_row, slot_score, class_weights.value_or(at::Tensor())};
    saved.insert(saved.end(), heads.begin(), heads.end());
    context->save_for_backward(std::move(saved));
    context->mark_non_differentiable({items, scales, slot_anchor, slot_row, slot_score, status});
    context->set_materialize_grads(false);  // else autograd would fill a zero tensor for each of these
    context->saved_data["strides"] = strides.vec();
    context->saved_data["sizes"] = c10::IValue(sizes);
    context->saved_data["reg_max"] = reg_max;
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
      result = backward_operator().call(gradients[0], heads, saved[0], saved[1], saved[2], saved[3], saved[4], strides,
                                        sizes, class_weights, context->saved_data["reg_max"].toInt());
    }
    // targets, settings, strides, sizes, num_targets, class_weights and the three options have no gradient.
    result.resize(result.size() + 9);
    return result;
  }
};

V8LossResult v8_loss_autograd(at::TensorList heads, const at::Tensor& targets, const at::Tensor& settings,
                              at::ArrayRef<double> strides, c10::SymIntArrayRef sizes,
                              const std::optional<at::Tensor>& num_targets,
                              const std::optional<at::Tensor>& class_weights, int64_t reg_max, int64_t topk,
                              int64_t topk2) {
  auto result =
      V8Loss::apply(heads, targets, settings, strides, sizes, num_targets, class_weights, reg_max, topk, topk2);
  return {result[0], result[1], result[2], result[3], result[4], result[5], result[6]};
}

std::vector<at::Tensor> v8_loss_backward_autograd(const at::Tensor& grad, at::TensorList heads,
                                                  const at::Tensor& targets, const at::Tensor& scales,
                                                  const at::Tensor& slot_anchor, const at::Tensor& slot_row,
                                                  const at::Tensor& slot_score, at::ArrayRef<double> strides,
                                                  c10::SymIntArrayRef sizes,
                                                  const std::optional<at::Tensor>& class_weights, int64_t reg_max) {
  variable_list inputs{grad};
  inputs.insert(inputs.end(), heads.begin(), heads.end());
  return without_second_gradient(
      inputs,
      [&] {
        return backward_operator().call(grad, heads, targets, scales, slot_anchor, slot_row, slot_score, strides, sizes,
                                        class_weights, reg_max);
      },
      "v8_loss: a second derivative was asked for, but it has a first derivative only; "
      "use Ultralytics' own v8DetectionLoss where a gradient of a gradient is wanted");
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("v8_loss", &v8_loss_autograd);
  m.impl("v8_loss_backward", &v8_loss_backward_autograd);
}

}  // namespace torch_fastdet
