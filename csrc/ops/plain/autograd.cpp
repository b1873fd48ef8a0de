// Register operators without a gradient, of families that have no autograd.cpp of their own.
#include "ops/common/autograd.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  torch_fastdet::without_gradient(m,
                                  {"linear_assignment", "sum_slices", "pad_and_sum", "sum_rows", "softmax_backward"});
}
