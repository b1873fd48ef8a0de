// Shapes, dtypes and memory formats of the upsample operators.
#include "ops/upsample/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::register_upsample<torch_fastdet::Meta>(m);
}
