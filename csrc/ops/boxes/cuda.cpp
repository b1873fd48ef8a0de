// bbox_iou and iou_loss on CUDA: launches on the current stream what checks/bbox_iou_ops.h has prepared.
#include <torch/library.h>

#include "ops/boxes/run.h"
#include "ops/common/launch.h"

namespace torch_fastdet {
namespace {

struct Cuda {
  static int64_t loss_partials(int64_t pairs) {
    bool clusters = false;
    check_launch(core::iou_loss_clusters(clusters), "iou_loss");
    return core::iou_loss_partials(pairs, clusters);
  }
  static void run(const core::BboxIouParams& params, const char* op) {
    check_launch(core::launch_bbox_iou(params, c10::cuda::getCurrentCUDAStream()), op);
  }
  static void run(const core::IouLossParams& params, const char* op) {
    check_launch(core::launch_iou_loss(params, c10::cuda::getCurrentCUDAStream()), op);
  }
  static void run(const core::IouBackwardParams& params, const char* op) {
    check_launch(core::launch_iou_backward(params, c10::cuda::getCurrentCUDAStream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  m.impl("bbox_iou", TORCH_FN(bbox_iou<Cuda>));
  m.impl("bbox_iou_backward", TORCH_FN(bbox_iou_backward<Cuda>));
  m.impl("iou_loss", TORCH_FN(iou_loss<Cuda>));
  m.impl("iou_loss_backward", TORCH_FN(iou_loss_backward<Cuda>));
}

}  // namespace torch_fastdet
