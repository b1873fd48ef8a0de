// softmax_backward has no gradient of its own: ultralytics/attention.py calls it in a backward pass.
#include "ops/common/autograd.h"

namespace torch_fastdet::softmax_autograd {

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  without_gradient(m, {"softmax_backward"});
}

}  // namespace torch_fastdet::softmax_autograd
