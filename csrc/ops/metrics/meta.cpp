// Shapes of the metrics operators.
#include "ops/metrics/run.h"

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  torch_fastdet::register_metrics<torch_fastdet::Meta>(m);
}
