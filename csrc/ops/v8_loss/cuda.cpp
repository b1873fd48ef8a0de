// The v8 losses on CUDA: launches on the current stream what run.h has prepared.

#include "ops/common/launch.h"
#include "ops/v8_loss/run.h"

namespace torch_fastdet::v8_loss_cuda {
namespace {

struct Cuda : OnDevice {
  static int64_t slot_blocks(const core::V8LossParams& params) { return core::v8_slot_blocks(params); }
  static int64_t slot_blocks(const core::V8ObbLossParams& params) { return core::v8_obb_slot_blocks(params); }
  static int64_t class_blocks(const core::V8LossParams& params) { return core::v8_class_blocks(params); }
  static void run(const core::V8LossParams& params) {
    check_launch(core::launch_v8_loss(params, current_stream()), "v8_loss");
  }
  static void run(const core::V8LossBackwardParams& params) {
    check_launch(core::launch_v8_loss_backward(params, current_stream()), "v8_loss_backward");
  }
  static void run(const core::V8PosedLossParams& params) {
    check_launch(core::launch_v8_posed_loss(params, current_stream()), "v8_posed_loss");
  }
  static void run(const core::V8MaskedLossParams& params) {
    check_launch(core::launch_v8_masked_loss(params, current_stream()), "v8_masked_loss");
  }
  static void run(const core::V8MaskLossParams& params) {
    check_launch(core::launch_v8_mask_loss(params, current_stream()), "v8_mask_loss");
  }
  static void run(const core::V8MaskLossBackwardParams& params) {
    check_launch(core::launch_v8_mask_loss_backward(params, current_stream()), "v8_mask_loss_backward");
  }
  static void run(const core::V8KeypointLossParams& params) {
    check_launch(core::launch_v8_keypoint_loss(params, current_stream()), "v8_keypoint_loss");
  }
  static void run(const core::V8KeypointLossBackwardParams& params) {
    check_launch(core::launch_v8_keypoint_loss_backward(params, current_stream()), "v8_keypoint_loss_backward");
  }
  static void run(const core::V8ObbLossParams& params) {
    check_launch(core::launch_v8_obb_loss(params, current_stream()), "v8_obb_loss");
  }
  static void run(const core::V8ObbLossBackwardParams& params) {
    check_launch(core::launch_v8_obb_loss_backward(params, current_stream()), "v8_obb_loss_backward");
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_v8_loss<Cuda>(m);
}

}  // namespace torch_fastdet::v8_loss_cuda
