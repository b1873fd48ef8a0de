// Shapes and dtypes of the v8 detection loss and its backward.
#include "ops/v8_loss/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::register_v8_loss<torch_fastdet::Meta>(m);
}
