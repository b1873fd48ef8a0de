// Autograd of stem_conv2d computes a gradient of the weight alone, for which it saves the squares.
#include "ops/common/autograd.h"
#include "ops/stem_conv/run.h"

namespace torch_fastdet::stem_conv_autograd {
namespace {

struct StemConv2d : torch::autograd::Function<StemConv2d> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& squares, const at::Tensor& weight) {
    context->save_for_backward({squares});
    context->saved_data["kernel_size"] = stem_size(weight, 2);
    return call_below_autograd<&torch_fastdet::stem_conv2d<Meta>>("stem_conv2d", squares, weight);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {
        {},
        call_gradient<&stem_conv2d_backward<Meta>>("stem_conv2d_backward", grads[0], context->get_saved_variables()[0],
                                                   context->saved_data["kernel_size"].toInt())};
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

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("stem_conv2d", stem_conv2d);
  first_gradient_only(m, "stem_conv2d_backward", "stem_conv2d", "torch.nn.functional.conv2d");
}

}  // namespace torch_fastdet::stem_conv_autograd
