// Shapes and dtypes of instance_masks.
#include "ops/masks/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::register_masks<torch_fastdet::Meta>(m);
}
