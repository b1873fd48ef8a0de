// space_to_depth is linear, so each direction is the other's gradient, of any order.
#include "ops/common/autograd.h"
#include "ops/space_to_depth/run.h"

namespace torch_fastdet::space_to_depth_autograd {
namespace {

template <bool kBackward>
constexpr const char* kName = kBackward ? "space_to_depth_backward" : "space_to_depth";

template <bool kBackward>
at::Tensor call(const at::Tensor& x, int64_t channels, bool border, std::optional<at::ScalarType> dtype) {
  constexpr auto* kOperator =
      kBackward ? &torch_fastdet::space_to_depth_backward<Meta> : &torch_fastdet::space_to_depth<Meta>;
  return call_operator<kOperator>(kName<kBackward>, x, channels, border, dtype);
}

template <bool kBackward>
struct SpaceToDepth : torch::autograd::Function<SpaceToDepth<kBackward>> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t channels, bool border,
                            std::optional<at::ScalarType> dtype) {
    // These are plain numbers in every program, because the channels determine the weights' shape.
    context->saved_data["channels"] = x.sym_size(1).guard_int(__FILE__, __LINE__);  // x.size(1) would fix all sizes
    context->saved_data["border"] = border;
    context->saved_data["dtype"] = x.scalar_type();
    const at::AutoDispatchBelowADInplaceOrView below;
    return call<kBackward>(x, channels, border, dtype);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list result(4);
    result[0] = call<!kBackward>(grads[0], context->saved_data["channels"].toInt(),
                                 context->saved_data["border"].toBool(), context->saved_data["dtype"].toScalarType());
    return result;
  }
};

template <bool kBackward>
at::Tensor space_to_depth(const at::Tensor& x, int64_t channels, bool border, std::optional<at::ScalarType> dtype) {
  check_strided(x, kName<kBackward>, kBackward ? "grad_output" : "x");
  return SpaceToDepth<kBackward>::apply(x, channels, border, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("space_to_depth", space_to_depth<false>);
  m.impl("space_to_depth_backward", space_to_depth<true>);
}

}  // namespace torch_fastdet::space_to_depth_autograd
