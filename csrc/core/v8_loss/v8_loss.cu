// Run the forward pass of the v8 detection loss, step by step. Its backward pass is in v8_loss_gradient.cu.
#include "core/v8_loss/v8_loss_launch.h"
#include "core/v8_loss/v8_posed_loss.h"

namespace torch_fastdet::core {

namespace {

template <typename Params>
cudaError_t launch(const Params& params, cudaStream_t stream) {
  const int64_t class_blocks = v8_class_blocks(params);
  cudaError_t error = launch_v8_start(params, class_blocks, stream);
  if (params.n * params.topk > 0) {
    if (error == cudaSuccess) error = launch_v8_assign(params, stream);
    if (error == cudaSuccess) error = launch_v8_terms(params, stream);
  }
  return error == cudaSuccess ? launch_v8_finish(params, class_blocks, stream) : error;
}

}  // namespace

cudaError_t launch_v8_loss(const V8LossParams& params, cudaStream_t stream) {
  return launch(params, stream);
}

cudaError_t launch_v8_posed_loss(const V8PosedLossParams& params, cudaStream_t stream) {
  return launch(params, stream);
}

}  // namespace torch_fastdet::core
