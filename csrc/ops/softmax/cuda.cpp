// softmax_backward on CUDA: one launch on the current stream.
#include <climits>

#include "ops/common/launch.h"
#include "ops/softmax/run.h"

namespace torch_fastdet::softmax_cuda {
namespace {

struct Cuda : OnDevice {
  static void run(const core::SoftmaxBackwardParams& p, const char* op) {
    TORCH_CHECK(p.batch * p.rows <= INT_MAX, op, ": ", p.batch * p.rows,
                " rows came, but at most 2147483647 are expected");
    check_launch(core::launch_softmax_backward(p, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_softmax<Cuda>(m);
}

}  // namespace torch_fastdet::softmax_cuda
