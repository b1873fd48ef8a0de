// Shapes of the multi_tensor operators: the same checks, and nothing done.
#include "ops/multi_tensor/library.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::multi_tensor::implement<true>(m);
}
