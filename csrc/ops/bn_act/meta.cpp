// bn_act on Meta: shapes, dtypes and memory formats only, of sizes that may be symbolic.
#include <torch/library.h>

#include "ops/bn_act/checks.h"

namespace torch_fastdet {
namespace {

BnActResult bn_act(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& running_mean, const OptionalTensor& running_var,
                   const OptionalTensor& num_batches_tracked, double, double, std::string_view activation, double,
                   const OptionalTensor& residual) {
  parse_activation(activation, "bn_act");
  check_bn_act(x, weight, bias, running_mean, running_var, num_batches_tracked, residual, "bn_act");
  return empty_bn_act(x);
}

BnActResult bn_act_backward(const at::Tensor& grad_y, const at::Tensor& x, const OptionalTensor& weight,
                            const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& invstd,
                            std::string_view activation, double) {
  parse_activation(activation, "bn_act_backward");
  check_bn_act_backward(grad_y, x, weight, bias, mean, invstd, "bn_act_backward");
  return {empty_like_image(x), empty_parameter_grad(x, weight), empty_parameter_grad(x, bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  m.impl("bn_act", TORCH_FN(bn_act));
  m.impl("bn_act_backward", TORCH_FN(bn_act_backward));
}

}  // namespace torch_fastdet
