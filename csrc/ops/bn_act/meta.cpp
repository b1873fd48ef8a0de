// Shapes, dtypes and memory formats of bn_act and its backward.
#include "ops/bn_act/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::register_bn_act<torch_fastdet::Meta>(m);
}
