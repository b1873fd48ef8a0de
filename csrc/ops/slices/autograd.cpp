// No gradients of their own: nn/joint.py and rewrites/casts.py call these in their backward passes.
#include "ops/common/autograd.h"

namespace torch_fastdet::slices_autograd {

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  without_gradient(m, {"sum_slices", "pad_and_sum", "sum_rows"});
}

}  // namespace torch_fastdet::slices_autograd
