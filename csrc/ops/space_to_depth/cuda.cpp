// space_to_depth on CUDA: launches on the current stream.
#include <climits>

#include "ops/common/launch.h"
#include "ops/space_to_depth/run.h"

namespace torch_fastdet::space_to_depth_cuda {
namespace {

void check_counts(int64_t rows, int64_t elements, const char* op) {
  TORCH_CHECK(rows <= INT_MAX && elements <= INT_MAX, op, ": ", rows, " rows of ", elements,
              " elements came, but at most 2147483647 of each are expected");
}

struct Cuda : OnDevice {
  static void forward(const core::SpaceToDepthParams& p, const char* op) {
    check_counts(p.batch * p.deep_height(), p.deep_width() * p.deep_channels, op);
    check_launch(core::launch_space_to_depth(p, current_stream()), op);
  }
  static void backward(const core::SpaceToDepthParams& p, const char* op) {
    check_counts(p.batch * p.height, p.width * p.channels, op);
    check_launch(core::launch_depth_to_space(p, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_space_to_depth<Cuda>(m);
}

}  // namespace torch_fastdet::space_to_depth_cuda
