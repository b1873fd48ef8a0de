// The upsample operators on CUDA: launches on the current stream.
#include "ops/common/launch.h"
#include "ops/upsample/run.h"

namespace torch_fastdet::upsample_cuda {
namespace {

struct Cuda : OnDevice {
  static void run(const core::UpsampleForwardParams& params, const char* op) {
    check_launch(core::launch_upsample_forward(params, current_stream()), op);
  }
  static void run(const core::UpsampleBackwardParams& params, const char* op) {
    check_launch(core::launch_upsample_backward(params, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_upsample<Cuda>(m);
}

}  // namespace torch_fastdet::upsample_cuda
