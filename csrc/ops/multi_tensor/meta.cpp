// Shapes of the multi_tensor operators: the same checks, and nothing done.
#include "ops/multi_tensor/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::multi_tensor::register_multi_tensor<torch_fastdet::Meta>(m);
}
