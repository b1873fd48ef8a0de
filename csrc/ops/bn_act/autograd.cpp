// Autograd of bn_act: the convolution's output and two vectors a channel are kept; the activation's input is
// recomputed.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops/bn_act/checks.h"
#include "ops/common/autograd.h"

namespace torch_fastdet {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Forward = BnActResult(const at::Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                            const OptionalTensor&, const OptionalTensor&, double, double, std::string_view, double,
                            const OptionalTensor&);
using Backward = BnActResult(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                             const at::Tensor&, const at::Tensor&, std::string_view, double);

const c10::TypedOperatorHandle<Backward>& backward_operator() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("torch_fastdet::bn_act_backward", "").typed<Backward>();
  return op;
}

struct BnAct : torch::autograd::Function<BnAct> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const OptionalTensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& running_mean,
                               const OptionalTensor& running_var, const OptionalTensor& num_batches_tracked,
                               double momentum, double eps, std::string_view activation, double slope,
                               const OptionalTensor& residual) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("torch_fastdet::bn_act", "").typed<Forward>();
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, mean, invstd] = op.call(x, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps,
                                     activation, slope, residual);
    context->save_for_backward({x, weight.value_or(at::Tensor()), bias.value_or(at::Tensor()), mean, invstd});
    context->mark_non_differentiable({mean, invstd});
    context->set_materialize_grads(false);
    context->saved_data["activation"] = std::string(activation);
    context->saved_data["slope"] = slope;
    context->saved_data["residual"] = is_given(residual);
    return {y, mean, invstd};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list result(11);
    if (!grads[0].defined()) return result;
    const auto saved = context->get_saved_variables();
    const auto [grad_x, grad_weight, grad_bias] = backward_operator().call(
        grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], context->saved_data["activation"].toStringRef(),
        context->saved_data["slope"].toDouble());
    result[0] = grad_x;
    if (saved[1].defined()) result[1] = grad_weight;
    if (saved[2].defined()) result[2] = grad_bias;
    // The residual is added to the result, so that its gradient is the result's own.
    if (context->saved_data["residual"].toBool()) result[10] = grads[0];
    return result;
  }
};

BnActResult bn_act(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& running_mean, const OptionalTensor& running_var,
                   const OptionalTensor& num_batches_tracked, double momentum, double eps, std::string_view activation,
                   double slope, const OptionalTensor& residual) {
  check_strided(x, "bn_act", "x");
  auto result = BnAct::apply(x, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps, activation,
                             slope, residual);
  return {result[0], result[1], result[2]};
}

BnActResult bn_act_backward(const at::Tensor& grad_y, const at::Tensor& x, const OptionalTensor& weight,
                            const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& invstd,
                            std::string_view activation, double slope) {
  const auto result = without_second_gradient(
      {grad_y, x, weight.value_or(at::Tensor()), bias.value_or(at::Tensor())},
      [&]() -> variable_list {
        auto [grad_x, grad_weight, grad_bias] =
            backward_operator().call(grad_y, x, weight, bias, mean, invstd, activation, slope);
        return {grad_x, grad_weight, grad_bias};
      },
      "bn_act: a second derivative was asked for, but it has a first derivative only; use BatchNorm2d and the "
      "activation where a gradient of a gradient is wanted");
  return {result[0], result[1], result[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("bn_act", &bn_act);
  m.impl("bn_act_backward", &bn_act_backward);
}

}  // namespace torch_fastdet
