// Autograd of max poolings: a byte for each pooled value is kept, its place in its window.
#include <ATen/core/Tensor.h>

#include <tuple>

#include "ops/common/autograd.h"
#include "ops/pool/checks.h"

namespace torch_fastdet::pool_autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// pools is that of max_pools_cat, or 0 for max_pool.
struct MaxPools : torch::autograd::Function<MaxPools> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, int64_t kernel_size, int64_t pools) {
    using Result = std::tuple<at::Tensor, at::Tensor>;
    static const auto one = find_operator<Result(const at::Tensor&, int64_t)>("max_pool");
    static const auto several = find_operator<Result(const at::Tensor&, int64_t, int64_t)>("max_pools_cat");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, indices] = pools == 0 ? one.call(x, kernel_size) : several.call(x, kernel_size, pools);
    context->save_for_backward({indices});
    context->mark_non_differentiable({indices});
    context->set_materialize_grads(false);
    context->saved_data["kernel_size"] = kernel_size;
    context->saved_data["pools"] = pools;
    return {y, indices};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    if (!grads[0].defined()) return {{}, {}, {}};
    using One = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t);
    using Several = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, int64_t);
    static const auto one = find_operator<One>("max_pool_backward");
    static const auto several = find_operator<Several>("max_pools_cat_backward");
    const at::Tensor indices = context->get_saved_variables()[0];
    const int64_t kernel_size = context->saved_data["kernel_size"].toInt();
    const int64_t pools = context->saved_data["pools"].toInt();
    return {pools == 0 ? call_gradient(one, grads[0], indices, kernel_size)
                       : call_gradient(several, grads[0], indices, kernel_size, pools),
            {},
            {}};
  }
};

std::tuple<at::Tensor, at::Tensor> max_pool(const at::Tensor& x, int64_t kernel_size) {
  check_strided(x, "max_pool", "x");
  const auto result = MaxPools::apply(x, kernel_size, 0);
  return {result[0], result[1]};
}

std::tuple<at::Tensor, at::Tensor> max_pools_cat(const at::Tensor& x, int64_t kernel_size, int64_t pools) {
  check_strided(x, "max_pools_cat", "x");
  check_pools(kernel_size, pools, "max_pools_cat");
  const auto result = MaxPools::apply(x, kernel_size, pools);
  return {result[0], result[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("max_pool", max_pool);
  m.impl("max_pools_cat", max_pools_cat);
  first_gradient_only(m, "max_pool_backward", "max_pool", "MaxPool2d");
  first_gradient_only(m, "max_pools_cat_backward", "max_pools_cat", "MaxPool2d");
  without_gradient(m, {"max_pools_"});
}

}  // namespace torch_fastdet::pool_autograd
