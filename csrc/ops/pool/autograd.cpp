// Autograd of max poolings saves a byte for each pooled value, its place in its window.
#include "ops/common/autograd.h"
#include "ops/pool/run.h"

namespace torch_fastdet::pool_autograd {
namespace {

using Result = std::tuple<at::Tensor, at::Tensor>;

// `pools` is that of max_pools_cat, or 0 for max_pool.
struct MaxPools : torch::autograd::Function<MaxPools> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, int64_t kernel_size, int64_t pools) {
    auto [y, indices] =
        pools == 0 ? call_below_autograd<&torch_fastdet::max_pool<Meta>>("max_pool", x, kernel_size)
                   : call_below_autograd<&torch_fastdet::max_pools_cat<Meta>>("max_pools_cat", x, kernel_size, pools);
    context->save_for_backward({indices});
    context->mark_non_differentiable({indices});
    context->set_materialize_grads(false);
    context->saved_data["kernel_size"] = kernel_size;
    context->saved_data["pools"] = pools;
    return {y, indices};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list result(3);
    if (!grads[0].defined()) return result;
    const at::Tensor indices = context->get_saved_variables()[0];
    const int64_t kernel_size = context->saved_data["kernel_size"].toInt();
    const int64_t pools = context->saved_data["pools"].toInt();
    result[0] = pools == 0
                    ? call_gradient<&max_pool_backward<Meta>>("max_pool_backward", grads[0], indices, kernel_size)
                    : call_gradient<&max_pools_cat_backward<Meta>>("max_pools_cat_backward", grads[0], indices,
                                                                   kernel_size, pools);
    return result;
  }
};

Result max_pool(const at::Tensor& x, int64_t kernel_size) {
  check_strided(x, "max_pool", "x");
  return as_tuple<Result>(MaxPools::apply(x, kernel_size, 0));
}

Result max_pools_cat(const at::Tensor& x, int64_t kernel_size, int64_t pools) {
  check_strided(x, "max_pools_cat", "x");
  check_pools(kernel_size, pools, "max_pools_cat");
  return as_tuple<Result>(MaxPools::apply(x, kernel_size, pools));
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
