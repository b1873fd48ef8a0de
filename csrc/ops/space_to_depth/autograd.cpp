// Gradients of space_to_depth: it is linear, so that each direction is the other's gradient, of any order.
#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/common/autograd.h"

namespace torch_fastdet::space_to_depth_autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Operator = at::Tensor(const at::Tensor&, int64_t, bool, std::optional<at::ScalarType>);

const c10::TypedOperatorHandle<Operator>& direction(bool backward) {
  static const auto forward_op = find_operator<Operator>("space_to_depth");
  static const auto backward_op = find_operator<Operator>("space_to_depth_backward");
  return backward ? backward_op : forward_op;
}

struct SpaceToDepth : torch::autograd::Function<SpaceToDepth> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, int64_t channels, bool border,
                            std::optional<at::ScalarType> dtype, bool backward) {
    // Plain numbers in every program: the channels decide the weights' shape.
    context->saved_data["channels"] = x.sym_size(1).guard_int(__FILE__, __LINE__);  // x.size(1) would fix all sizes
    context->saved_data["border"] = border;
    context->saved_data["dtype"] = x.scalar_type();
    context->saved_data["backward"] = backward;
    const at::AutoDispatchBelowADInplaceOrView below;
    return direction(backward).call(x, channels, border, dtype);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const bool backward = context->saved_data["backward"].toBool();
    return {
        direction(!backward).call(grads[0], context->saved_data["channels"].toInt(),
                                  context->saved_data["border"].toBool(), context->saved_data["dtype"].toScalarType()),
        {},
        {},
        {},
        {}};
  }
};

// A sparse tensor passes here on its way to a backend that we have no kernel for: say so in a sentence first.
at::Tensor space_to_depth(const at::Tensor& x, int64_t channels, bool border, std::optional<at::ScalarType> dtype) {
  check_strided(x, "space_to_depth", "x");
  return SpaceToDepth::apply(x, channels, border, dtype, false);
}

at::Tensor space_to_depth_backward(const at::Tensor& grad_output, int64_t channels, bool border,
                                   std::optional<at::ScalarType> dtype) {
  check_strided(grad_output, "space_to_depth_backward", "grad_output");
  return SpaceToDepth::apply(grad_output, channels, border, dtype, true);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("space_to_depth", space_to_depth);
  m.impl("space_to_depth_backward", space_to_depth_backward);
}

}  // namespace torch_fastdet::space_to_depth_autograd
