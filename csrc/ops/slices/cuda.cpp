// sum_slices and pad_and_sum on CUDA: one launch and two on the current stream.
#include "ops/common/launch.h"
#include "ops/slices/run.h"

namespace torch_fastdet::slices_cuda {
namespace {

struct Cuda : OnDevice {
  static void sum(const core::SumSlicesParams& p, const char* op) {
    check_launch(core::launch_sum_slices(p, current_stream()), op);
  }
  static void pad(const core::PadAndSumParams& p, const char* op) {
    check_launch(core::launch_pad_and_sum(p, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_slices<Cuda>(m);
}

}  // namespace torch_fastdet::slices_cuda
