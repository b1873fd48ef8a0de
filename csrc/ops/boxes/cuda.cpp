// bbox_iou and iou_loss on CUDA: launches on the current stream.
#include "ops/boxes/run.h"
#include "ops/common/launch.h"

namespace torch_fastdet::boxes_cuda {
namespace {

struct Cuda : OnDevice {
  static int64_t loss_partials(int64_t pairs) {
    bool clusters = false;
    check_launch(core::iou_loss_clusters(clusters), "iou_loss");
    return core::iou_loss_partials(pairs, clusters);
  }
  static void run(const core::BboxIouParams& params, const char* op) {
    check_launch(core::launch_bbox_iou(params, current_stream()), op);
  }
  static void run(const core::IouLossParams& params, const char* op) {
    check_launch(core::launch_iou_loss(params, current_stream()), op);
  }
  static void run(const core::IouBackwardParams& params, const char* op) {
    check_launch(core::launch_iou_backward(params, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_boxes<Cuda>(m);
}

}  // namespace torch_fastdet::boxes_cuda
