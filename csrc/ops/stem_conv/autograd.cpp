// Autograd of stem_conv2d: a gradient of the weight alone, for which the squares are kept.
#include <ATen/core/Tensor.h>

#include "ops/common/autograd.h"

namespace torch_fastdet::stem_conv_autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Backward = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t);

const c10::TypedOperatorHandle<Backward>& backward_operator() {
  static const auto op = find_operator<Backward>("stem_conv2d_backward");
  return op;
}

struct StemConv2d : torch::autograd::Function<StemConv2d> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& squares, const at::Tensor& weight) {
    static const auto op = find_operator<at::Tensor(const at::Tensor&, const at::Tensor&)>("stem_conv2d");
    const at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor out = op.call(squares, weight);
    context->save_for_backward({squares});
    context->saved_data["kernel_size"] = weight.sym_size(2).guard_int(__FILE__, __LINE__);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const at::Tensor squares = context->get_saved_variables()[0];
    return {{}, backward_operator().call(grads[0], squares, context->saved_data["kernel_size"].toInt())};
  }
};

at::Tensor stem_conv2d(const at::Tensor& squares, const at::Tensor& weight) {
  check_strided(squares, "stem_conv2d", "squares");
  check_strided(weight, "stem_conv2d", "weight");
  TORCH_CHECK(!squares.requires_grad() || !at::GradMode::is_enabled(),
              "stem_conv2d: squares requires grad, but it has a gradient of weight alone; use torch.nn.functional."
              "conv2d where the images' gradient is needed");
  return StemConv2d::apply(squares, weight);
}

at::Tensor stem_conv2d_backward(const at::Tensor& grad_output, const at::Tensor& squares, int64_t kernel_size) {
  check_strided(grad_output, "stem_conv2d_backward", "grad_output");
  check_strided(squares, "stem_conv2d_backward", "squares");
  return without_second_gradient(
      {grad_output, squares},
      [&]() -> variable_list { return {backward_operator().call(grad_output, squares, kernel_size)}; },
      "stem_conv2d: a second derivative was asked for, but it has a first derivative only; use torch.nn.functional."
      "conv2d where a gradient of a gradient is needed")[0];
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("stem_conv2d", stem_conv2d);
  m.impl("stem_conv2d_backward", stem_conv2d_backward);
}

}  // namespace torch_fastdet::stem_conv_autograd
