// sum_slices has no gradient of its own: layers/joint.py and layers/split.py call it in their backward passes.
#include "ops/common/autograd.h"

namespace torch_fastdet::slices_autograd {

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  without_gradient(m, {"sum_slices"});
}

}  // namespace torch_fastdet::slices_autograd
