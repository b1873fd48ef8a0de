// Shapes and dtypes of the post-processing operators.
#include "ops/nms/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::register_nms<torch_fastdet::Meta>(m);
}
