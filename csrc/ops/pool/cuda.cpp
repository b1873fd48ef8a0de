// max_pools_cat on CUDA: launches on the current stream, one after the other.
#include <climits>

#include "ops/common/launch.h"
#include "ops/pool/run.h"

namespace torch_fastdet::pool_cuda {
namespace {

void check_counts(const core::MaxPoolParams& p, const char* op) {
  const int64_t rows = p.batch * (p.channels_last ? p.height : p.channels);
  const int64_t elements = p.width * (p.channels_last ? p.channels : p.height);
  TORCH_CHECK(rows <= INT_MAX && elements <= INT_MAX, op, ": ", rows, " rows of ", elements,
              " elements came, but at most 2147483647 of each are expected");
}

struct Cuda : OnDevice {
  static void forward(const core::MaxPoolParams& p, const char* op) {
    check_counts(p, op);
    check_launch(core::launch_max_pool_forward(p, current_stream()), op);
  }
  static void backward(const core::MaxPoolParams& p, const char* op) {
    check_counts(p, op);
    check_launch(core::launch_max_pool_backward(p, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_pool<Cuda>(m);
}

}  // namespace torch_fastdet::pool_cuda
