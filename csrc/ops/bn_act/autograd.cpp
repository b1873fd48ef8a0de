// Autograd of bn_act: the convolution's output and two vectors a channel are kept; the activation's input is
// recomputed.
#include "ops/common/autograd.h"
#include "ops/bn_act/run.h"

namespace torch_fastdet {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Norm = BnActNorm::Types;
using Activation = BnActActivation::Types;

BnActResult call(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, const Norm& norm,
                 const Activation& activation, const OptionalTensor& residual) {
  static const auto op = find_operator<unpacked_signature<&bn_act<Meta>>>("bn_act");
  return std::apply([&](const auto&... option) { return op.call(x, weight, bias, option..., residual); },
                    std::tuple_cat(norm, activation));
}

BnActResult call_backward(const at::Tensor& grad_y, const at::Tensor& x, const OptionalTensor& weight,
                          const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& invstd,
                          const Activation& activation) {
  static const auto op = find_operator<unpacked_signature<&bn_act_backward<Meta>>>("bn_act_backward");
  const auto& [name, slope] = activation;
  return op.call(grad_y, x, weight, bias, mean, invstd, name, slope);
}

struct BnAct : torch::autograd::Function<BnAct> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const OptionalTensor& weight,
                               const OptionalTensor& bias, const Norm& norm, const Activation& activation,
                               const OptionalTensor& residual) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, mean, invstd] = call(x, weight, bias, norm, activation, residual);
    context->save_for_backward({x, weight.value_or(at::Tensor()), bias.value_or(at::Tensor()), mean, invstd});
    context->mark_non_differentiable({mean, invstd});
    context->set_materialize_grads(false);
    const auto& [name, slope] = activation;
    context->saved_data["activation"] = std::string(name);
    context->saved_data["slope"] = slope;
    context->saved_data["residual"] = is_given(residual);
    return {y, mean, invstd};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list result(6);  // the norm and the activation have no gradient
    if (!grads[0].defined()) return result;
    const auto saved = context->get_saved_variables();
    const auto [grad_x, grad_weight, grad_bias] =
        call_backward(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4],
                      {context->saved_data["activation"].toStringRef(), context->saved_data["slope"].toDouble()});
    result[0] = grad_x;
    if (saved[1].defined()) result[1] = grad_weight;
    if (saved[2].defined()) result[2] = grad_bias;
    // The residual is added to the result, so that its gradient is the result's own.
    if (context->saved_data["residual"].toBool()) result[5] = grads[0];
    return result;
  }
};

BnActResult bn_act_autograd(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                            const Norm& norm, const Activation& activation, const OptionalTensor& residual) {
  check_strided(x, "bn_act", "x");
  auto result = BnAct::apply(x, weight, bias, norm, activation, residual);
  return {result[0], result[1], result[2]};
}

BnActResult bn_act_backward_autograd(const at::Tensor& grad_y, const at::Tensor& x, const OptionalTensor& weight,
                                     const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& invstd,
                                     const Activation& activation) {
  const auto result = without_second_gradient(
      {grad_y, x, weight.value_or(at::Tensor()), bias.value_or(at::Tensor())},
      [&]() -> variable_list {
        auto [grad_x, grad_weight, grad_bias] = call_backward(grad_y, x, weight, bias, mean, invstd, activation);
        return {grad_x, grad_weight, grad_bias};
      },
      "bn_act: a second derivative was asked for, but it has a first derivative only; use BatchNorm2d and the "
      "activation where a gradient of a gradient is wanted");
  return {result[0], result[1], result[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("bn_act", unpack<&bn_act_autograd>);
  m.impl("bn_act_backward", unpack<&bn_act_backward_autograd>);
}

}  // namespace torch_fastdet
