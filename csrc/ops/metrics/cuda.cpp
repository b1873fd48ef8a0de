// Detections matched with labels on the GPU: one launch on the current stream.
#include "ops/common/launch.h"
#include "ops/metrics/run.h"

namespace torch_fastdet::metrics_cuda {
namespace {

struct Cuda : OnDevice {
  static void run(const core::MatchParams& params, const char* op) {
    check_launch(core::launch_match(params, current_stream()), op);
  }
  static void run(const core::ConfusionParams& params, const char* op) {
    check_launch(core::launch_confusion(params, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_metrics<Cuda>(m);
}

}  // namespace torch_fastdet::metrics_cuda
