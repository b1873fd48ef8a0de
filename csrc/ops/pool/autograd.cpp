// Autograd of max_pools_cat: a byte for each pooled value is kept, its place in its window.
#include <ATen/core/Tensor.h>

#include <tuple>

#include "ops/common/autograd.h"

namespace torch_fastdet::pool_autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct MaxPoolsCat : torch::autograd::Function<MaxPoolsCat> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, int64_t kernel_size, int64_t pools) {
    static const auto op =
        find_operator<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, int64_t, int64_t)>("max_pools_cat");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, indices] = op.call(x, kernel_size, pools);
    context->save_for_backward({indices});
    context->mark_non_differentiable({indices});
    context->set_materialize_grads(false);
    context->saved_data["kernel_size"] = kernel_size;
    context->saved_data["pools"] = pools;
    return {y, indices};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    if (!grads[0].defined()) return {{}, {}, {}};
    using Backward = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, int64_t);
    static const auto op = find_operator<Backward>("max_pools_cat_backward");
    return {call_gradient(op, grads[0], context->get_saved_variables()[0], context->saved_data["kernel_size"].toInt(),
                          context->saved_data["pools"].toInt()),
            {},
            {}};
  }
};

std::tuple<at::Tensor, at::Tensor> max_pools_cat(const at::Tensor& x, int64_t kernel_size, int64_t pools) {
  check_strided(x, "max_pools_cat", "x");
  const auto result = MaxPoolsCat::apply(x, kernel_size, pools);
  return {result[0], result[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("max_pools_cat", max_pools_cat);
  first_gradient_only(m, "max_pools_cat_backward", "max_pools_cat", "MaxPool2d");
  without_gradient(m, {"max_pools_"});
}

}  // namespace torch_fastdet::pool_autograd
