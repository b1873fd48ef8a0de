// Operators without a gradient of their own, in families that have no other autograd.
#include "ops/common/autograd.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  torch_fastdet::without_gradient(m,
                                  {"linear_assignment", "sum_slices", "pad_and_sum", "sum_rows", "softmax_backward"});
}
