// Shapes, dtypes and memory formats of max_pools_cat and its backward.
#include "ops/pool/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::register_pool<torch_fastdet::Meta>(m);
}
