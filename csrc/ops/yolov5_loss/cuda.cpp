// yolov5_loss on CUDA: launches on the current stream.
#include "ops/common/launch.h"
#include "ops/yolov5_loss/run.h"

namespace torch_fastdet::yolov5_loss_cuda {
namespace {

struct Cuda : OnDevice {
  static int64_t match_sums(const core::Yolov5LossParams& params) {
    return 3 * params.nl * core::yolov5_match_blocks(params);
  }
  static int64_t scratch(const core::Yolov5LossParams& params) {
    return match_sums(params) + params.nl * core::yolov5_object_blocks(params);
  }
  static void run(core::Yolov5LossParams& params, const at::Tensor& scratch) {
    params.match_partials = scratch.data_ptr();
    params.object_partials = static_cast<char*>(scratch.data_ptr()) + match_sums(params) * scratch.element_size();
    check_launch(core::launch_yolov5_loss(params, current_stream()), "yolov5_loss");
  }
  static void run(const core::Yolov5LossBackwardParams& params) {
    check_launch(core::launch_yolov5_loss_backward(params, current_stream()), "yolov5_loss_backward");
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_yolov5_loss<Cuda>(m);
}

}  // namespace torch_fastdet::yolov5_loss_cuda
