// An assignment has no gradient.
#include "ops/common/autograd.h"

namespace torch_fastdet::linear_assignment_autograd {

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  without_gradient(m, {"linear_assignment"});
}

}  // namespace torch_fastdet::linear_assignment_autograd
