// Gradients of the upsample operators. All are linear, so that each backward is an operator with a gradient of its own:
// derivatives of any order work, and nothing is saved but sizes and dtypes.
#include <ATen/core/Tensor.h>

#include "ops/common/autograd.h"

namespace torch_fastdet::upsample_autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor call_upsample(const at::Tensor& x) {
  static const auto op = find_operator<at::Tensor(const at::Tensor&)>("upsample_nearest2x");
  return op.call(x);
}

at::Tensor call_upsample_backward(const at::Tensor& grad_output) {
  static const auto op = find_operator<at::Tensor(const at::Tensor&)>("upsample_nearest2x_backward");
  return op.call(grad_output);
}

at::Tensor call_upsample_cat(const at::Tensor& x, const at::Tensor& skip) {
  static const auto op = find_operator<at::Tensor(const at::Tensor&, const at::Tensor&)>("upsample_nearest2x_cat");
  return op.call(x, skip);
}

struct UpsampleNearest2x : torch::autograd::Function<UpsampleNearest2x> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_upsample(x);
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) {
    return {call_upsample_backward(grads[0])};
  }
};

struct UpsampleNearest2xBackward : torch::autograd::Function<UpsampleNearest2xBackward> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& grad_output) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_upsample_backward(grad_output);
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) { return {call_upsample(grads[0])}; }
};

struct UpsampleNearest2xCat : torch::autograd::Function<UpsampleNearest2xCat> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& skip) {
    ctx->saved_data["x_channels"] = x.sym_size(1);
    ctx->saved_data["skip_channels"] = skip.sym_size(1);
    ctx->saved_data["x_dtype"] = x.scalar_type();
    ctx->saved_data["skip_dtype"] = skip.scalar_type();
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_upsample_cat(x, skip);
  }
  // As in torch.cat, the gradient of skip is a view of its channels: it costs no launch and no memory. The kernel
  // reads x's channels in place.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const c10::SymInt x_channels = ctx->saved_data["x_channels"].toSymInt();
    at::Tensor grad_x, grad_skip;
    if (ctx->needs_input_grad(0)) {
      grad_x = call_upsample_backward(grads[0].narrow_symint(1, 0, x_channels))
                   .to(ctx->saved_data["x_dtype"].toScalarType());
    }
    if (ctx->needs_input_grad(1)) {
      grad_skip = grads[0]
                      .narrow_symint(1, x_channels, ctx->saved_data["skip_channels"].toSymInt())
                      .to(ctx->saved_data["skip_dtype"].toScalarType());
    }
    return {grad_x, grad_skip};
  }
};

// A sparse tensor passes here on its way to a backend that we have no kernel for: raise our own error first.
at::Tensor upsample_nearest2x(const at::Tensor& x) {
  check_strided(x, "upsample_nearest2x", "x");
  return UpsampleNearest2x::apply(x);
}

at::Tensor upsample_nearest2x_backward(const at::Tensor& grad_output) {
  check_strided(grad_output, "upsample_nearest2x_backward", "grad_output");
  return UpsampleNearest2xBackward::apply(grad_output);
}

at::Tensor upsample_nearest2x_cat(const at::Tensor& x, const at::Tensor& skip) {
  check_strided(x, "upsample_nearest2x_cat", "x");
  check_strided(skip, "upsample_nearest2x_cat", "skip");
  return UpsampleNearest2xCat::apply(x, skip);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("upsample_nearest2x", upsample_nearest2x);
  m.impl("upsample_nearest2x_backward", upsample_nearest2x_backward);
  m.impl("upsample_nearest2x_cat", upsample_nearest2x_cat);
}

}  // namespace torch_fastdet::upsample_autograd
