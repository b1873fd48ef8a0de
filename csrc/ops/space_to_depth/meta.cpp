// Shapes, dtypes and memory formats of space_to_depth and its backward.
#include "ops/space_to_depth/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::register_space_to_depth<torch_fastdet::Meta>(m);
}
