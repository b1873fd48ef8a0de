// The upsample operators are linear, so derivatives of any order work.
#include "ops/common/autograd.h"
#include "ops/upsample/run.h"

namespace torch_fastdet::upsample_autograd {
namespace {

// Each direction is the other's gradient.
template <bool kBackward>
constexpr const char* kName = kBackward ? "upsample_nearest2x_backward" : "upsample_nearest2x";

template <bool kBackward>
at::Tensor call(const at::Tensor& x) {
  constexpr auto* kOperator =
      kBackward ? &torch_fastdet::upsample_nearest2x_backward<Meta> : &torch_fastdet::upsample_nearest2x<Meta>;
  return call_operator<kOperator>(kName<kBackward>, x);
}

template <bool kBackward>
struct Upsample : torch::autograd::Function<Upsample<kBackward>> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call<kBackward>(x);
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) { return {call<!kBackward>(grads[0])}; }
};

struct UpsampleCat : torch::autograd::Function<UpsampleCat> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& skip) {
    ctx->saved_data["x_channels"] = x.sym_size(1);
    ctx->saved_data["skip_channels"] = skip.sym_size(1);
    ctx->saved_data["x_dtype"] = x.scalar_type();
    ctx->saved_data["skip_dtype"] = skip.scalar_type();
    return call_below_autograd<&torch_fastdet::upsample_nearest2x_cat<Meta>>("upsample_nearest2x_cat", x, skip);
  }
  // Like torch.cat, make the gradient of skip a view of its channels. The kernel reads x's channels in place.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const c10::SymInt x_channels = ctx->saved_data["x_channels"].toSymInt();
    at::Tensor grad_x, grad_skip;
    if (ctx->needs_input_grad(0)) {
      grad_x = call<true>(grads[0].narrow_symint(1, 0, x_channels)).to(ctx->saved_data["x_dtype"].toScalarType());
    }
    if (ctx->needs_input_grad(1)) {
      grad_skip = grads[0]
                      .narrow_symint(1, x_channels, ctx->saved_data["skip_channels"].toSymInt())
                      .to(ctx->saved_data["skip_dtype"].toScalarType());
    }
    return {grad_x, grad_skip};
  }
};

template <bool kBackward>
at::Tensor upsample_nearest2x(const at::Tensor& x) {
  check_strided(x, kName<kBackward>, kBackward ? "grad_output" : "x");
  return Upsample<kBackward>::apply(x);
}

at::Tensor upsample_nearest2x_cat(const at::Tensor& x, const at::Tensor& skip) {
  check_strided(x, "upsample_nearest2x_cat", "x");
  check_strided(skip, "upsample_nearest2x_cat", "skip");
  return UpsampleCat::apply(x, skip);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("upsample_nearest2x", upsample_nearest2x<false>);
  m.impl("upsample_nearest2x_backward", upsample_nearest2x<true>);
  m.impl("upsample_nearest2x_cat", upsample_nearest2x_cat);
}

}  // namespace torch_fastdet::upsample_autograd
