// Detections matched with labels on the GPU: one launch on the current stream.
#include <torch/library.h>

#include "ops/common/launch.h"
#include "ops/metrics/run.h"

namespace torch_fastdet {
namespace {

struct Cuda {
  static void run(const core::MatchParams& params, const char* op) {
    check_launch(core::launch_match(params, c10::cuda::getCurrentCUDAStream()), op);
  }
  static void run(const core::ConfusionParams& params, const char* op) {
    check_launch(core::launch_confusion(params, c10::cuda::getCurrentCUDAStream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  m.impl("match_detections", match_detections<Cuda>);
  m.impl("confusion_matrix_", confusion_matrix_<Cuda>);
}

}  // namespace torch_fastdet
