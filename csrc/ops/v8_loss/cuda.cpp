// The v8 detection loss on CUDA: launches on the current stream what run.h has prepared.
#include <torch/library.h>

#include "ops/common/launch.h"
#include "ops/v8_loss/run.h"

namespace torch_fastdet {
namespace {

struct Cuda {
  static int64_t slot_blocks(const core::V8LossParams& params) { return core::v8_slot_blocks(params); }
  static int64_t class_blocks(const core::V8LossParams& params) { return core::v8_class_blocks(params); }
  static void run(const core::V8LossParams& params) {
    check_launch(core::launch_v8_loss(params, c10::cuda::getCurrentCUDAStream()), "v8_loss");
  }
  static void run(const core::V8LossBackwardParams& params) {
    check_launch(core::launch_v8_loss_backward(params, c10::cuda::getCurrentCUDAStream()), "v8_loss_backward");
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  m.impl("v8_loss", TORCH_FN(v8_loss<Cuda>));
  m.impl("v8_loss_backward", TORCH_FN(v8_loss_backward<Cuda>));
}

}  // namespace torch_fastdet
