// Autograd of bn_act saves the convolution's output and two vectors, and recomputes the activation's input.
#include "ops/common/autograd.h"
#include "ops/bn_act/run.h"

namespace torch_fastdet::bn_act_autograd {
namespace {

using Norm = BnActNorm::Types;
using Activation = BnActActivation::Types;
using Parts = BnActParts::Types;

BnActResult call_backward(AutogradContext* context, const at::Tensor& grad_y, const at::Tensor& x,
                          const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& mean,
                          const at::Tensor& invstd) {
  return call_gradient<&bn_act_backward<Meta>>("bn_act_backward", grad_y, x, weight, bias, mean, invstd,
                                               context->saved_data["activation"].toStringRef(),
                                               context->saved_data["slope"].toDouble());
}

variable_list save(AutogradContext* context, const BnActResult& result, variable_list saved,
                   const Activation& activation, const OptionalTensor& residual) {
  const auto& [y, mean, invstd] = result;
  for (const at::Tensor& statistic : {mean, invstd}) saved.push_back(statistic);
  context->save_for_backward(std::move(saved));
  context->mark_non_differentiable({mean, invstd});
  context->set_materialize_grads(false);
  const auto& [name, slope] = activation;
  context->saved_data["activation"] = std::string(name);
  context->saved_data["slope"] = slope;
  context->saved_data["residual"] = is_given(residual);
  return {y, mean, invstd};
}

struct BnAct : torch::autograd::Function<BnAct> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const OptionalTensor& weight,
                               const OptionalTensor& bias, const Norm& norm, const Activation& activation,
                               const OptionalTensor& residual) {
    const auto call = [&](const auto&... option) {
      return call_below_autograd<&bn_act<Meta>>("bn_act", x, weight, bias, option..., residual);
    };
    const auto result = std::apply(call, std::tuple_cat(norm, activation));
    return save(context, result, {x, weight.value_or(at::Tensor()), bias.value_or(at::Tensor())}, activation, residual);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list result(6);  // the norm and the activation have no gradient
    if (!grads[0].defined()) return result;
    const auto saved = context->get_saved_variables();
    const auto [grad_x, grad_weight, grad_bias] =
        call_backward(context, grads[0], saved[0], saved[1], saved[2], saved[3], saved[4]);
    result[0] = grad_x;
    if (saved[1].defined()) result[1] = grad_weight;
    if (saved[2].defined()) result[2] = grad_bias;
    // The residual is added to the result, so its gradient is the result's own.
    if (context->saved_data["residual"].toBool()) result[5] = grads[0];
    return result;
  }
};

// Each part is a bn_act whose result is a part of y; its backward pass reads that part of y's gradient in place.
struct BnActCat : torch::autograd::Function<BnActCat> {
  static variable_list forward(AutogradContext* context, at::TensorList x, at::TensorList weight, at::TensorList bias,
                               const Parts& parts, const Activation& activation, const OptionalTensor& residual) {
    const auto call = [&](const auto&... option) {
      return call_below_autograd<&bn_act_cat<Meta>>("bn_act_cat", x, option..., residual);
    };
    const auto result = std::apply(call, std::tuple_cat(parts, activation));
    variable_list saved;
    for (const at::TensorList list : {x, weight, bias}) saved.insert(saved.end(), list.begin(), list.end());
    return save(context, result, std::move(saved), activation, residual);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const size_t parts = saved.size() / 3;  // saved after their tensors: mean and invstd
    variable_list result(3 * parts + 3);    // the parts and the activation have no gradient
    if (!grads[0].defined()) return result;
    c10::SymInt begin = 0;
    for (size_t i = 0; i < parts; ++i) {
      const at::Tensor& x = saved[i];
      const at::Tensor grad = grads[0].narrow_symint(1, begin, x.sym_size(1));
      const auto part = [&](const at::Tensor& of_all) { return of_all.narrow_symint(0, begin, x.sym_size(1)); };
      std::tie(result[i], result[parts + i], result[2 * parts + i]) = call_backward(
          context, grad, x, saved[parts + i], saved[2 * parts + i], part(saved[3 * parts]), part(saved[3 * parts + 1]));
      if (i == 0 && context->saved_data["residual"].toBool()) result.back() = grad;
      begin += x.sym_size(1);
    }
    return result;
  }
};

BnActResult bn_act_cat_autograd(at::TensorList x, const Parts& parts, const Activation& activation,
                                const OptionalTensor& residual) {
  // Check before autograd unpacks and counts the lists.
  check_bn_act_cat(x, options_from<BnActParts>(parts), residual, "bn_act_cat");
  return as_tuple<BnActResult>(BnActCat::apply(x, std::get<0>(parts), std::get<1>(parts), parts, activation, residual));
}

BnActResult bn_act_autograd(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                            const Norm& norm, const Activation& activation, const OptionalTensor& residual) {
  check_strided(x, "bn_act", "x");
  return as_tuple<BnActResult>(BnAct::apply(x, weight, bias, norm, activation, residual));
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("bn_act", unpack<&bn_act_autograd>);
  m.impl("bn_act_cat", unpack<&bn_act_cat_autograd>);
  first_gradient_only(m, "bn_act_backward", "bn_act", "BatchNorm2d and the activation");
  without_gradient(m, {"bn_act_parts", "bn_act_parts_backward", "bias_act"});
}

}  // namespace torch_fastdet::bn_act_autograd
