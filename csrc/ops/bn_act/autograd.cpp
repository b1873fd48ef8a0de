// Autograd of bn_act: the convolution's output and two vectors a channel are kept; the activation's input is
// recomputed.
#include "ops/common/autograd.h"
#include "ops/bn_act/run.h"

namespace torch_fastdet::bn_act_autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Norm = BnActNorm::Types;
using Activation = BnActActivation::Types;
using Parts = BnActParts::Types;

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
  return call_gradient(op, grad_y, x, weight, bias, mean, invstd, name, slope);
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

// Each part is bn_act, whose result is a part of y: its backward pass reads that part of y's gradient in place.
struct BnActCat : torch::autograd::Function<BnActCat> {
  static variable_list forward(AutogradContext* context, at::TensorList x, at::TensorList weight, at::TensorList bias,
                               const Parts& parts, const Activation& activation, const OptionalTensor& residual) {
    static const auto op = find_operator<unpacked_signature<&bn_act_cat<Meta>>>("bn_act_cat");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, mean, invstd] = std::apply([&](const auto&... option) { return op.call(x, option..., residual); },
                                        std::tuple_cat(parts, activation));
    variable_list saved{mean, invstd};
    for (const at::TensorList list : {x, weight, bias}) saved.insert(saved.end(), list.begin(), list.end());
    context->save_for_backward(std::move(saved));
    context->mark_non_differentiable({mean, invstd});
    context->set_materialize_grads(false);
    const auto& [name, slope] = activation;
    context->saved_data["activation"] = std::string(name);
    context->saved_data["slope"] = slope;
    context->saved_data["residual"] = is_given(residual);
    return {y, mean, invstd};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const size_t parts = (saved.size() - 2) / 3;
    variable_list result(3 * parts + 3);  // the parts and the activation have no gradient
    if (!grads[0].defined()) return result;
    c10::SymInt begin = 0;
    for (size_t i = 0; i < parts; ++i) {
      const at::Tensor& x = saved[2 + i];
      const at::Tensor grad = grads[0].narrow_symint(1, begin, x.sym_size(1));
      std::tie(result[i], result[parts + i], result[2 * parts + i]) = call_backward(
          grad, x, saved[2 + parts + i], saved[2 + 2 * parts + i], saved[0].narrow_symint(0, begin, x.sym_size(1)),
          saved[1].narrow_symint(0, begin, x.sym_size(1)),
          {context->saved_data["activation"].toStringRef(), context->saved_data["slope"].toDouble()});
      if (i == 0 && context->saved_data["residual"].toBool()) result.back() = grad;
      begin += x.sym_size(1);
    }
    return result;
  }
};

BnActResult bn_act_cat_autograd(at::TensorList x, const Parts& parts, const Activation& activation,
                                const OptionalTensor& residual) {
  // Before autograd takes the lists apart, and counts them.
  check_bn_act_cat(x, options_from<BnActParts>(parts), residual, "bn_act_cat");
  auto result = BnActCat::apply(x, std::get<0>(parts), std::get<1>(parts), parts, activation, residual);
  return {result[0], result[1], result[2]};
}

BnActResult bn_act_autograd(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                            const Norm& norm, const Activation& activation, const OptionalTensor& residual) {
  check_strided(x, "bn_act", "x");
  auto result = BnAct::apply(x, weight, bias, norm, activation, residual);
  return {result[0], result[1], result[2]};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("bn_act", unpack<&bn_act_autograd>);
  m.impl("bn_act_cat", unpack<&bn_act_cat_autograd>);
  first_gradient_only(m, "bn_act_backward", "bn_act", "BatchNorm2d and the activation");
  without_gradient(m, {"bn_act_parts", "bn_act_parts_backward", "bias_act"});
}

}  // namespace torch_fastdet::bn_act_autograd
