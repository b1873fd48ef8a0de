// Instance masks have no gradient.
#include "ops/common/autograd.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  torch_fastdet::without_gradient(m, {"instance_masks"});
}
