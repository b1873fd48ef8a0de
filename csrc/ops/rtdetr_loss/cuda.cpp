// RT-DETR's loss on CUDA: launches on the current stream.
#include "ops/common/launch.h"
#include "ops/rtdetr_loss/run.h"

namespace torch_fastdet::rtdetr_loss_cuda {
namespace {

struct Cuda : OnDevice {
  static int64_t assignment(int64_t queries, int64_t most) { return core::assignment_scratch(queries, most); }

  static void run(const core::RtdetrLossParams& params) {
    check_launch(core::launch_rtdetr_loss(params, current_stream()), kRtdetrLoss);
  }
  static void run_backward(const core::RtdetrLossParams& params) {
    check_launch(core::launch_rtdetr_loss_backward(params, current_stream()), "rtdetr_loss_backward");
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_rtdetr_loss<Cuda>(m);
}

}  // namespace torch_fastdet::rtdetr_loss_cuda
