// These are the selection kernels of one layout; see nms_select.cuh.
#include "core/nms/nms_select.cuh"

namespace torch_fastdet::core {

cudaError_t launch_select_prediction(SelectKernel& kernel, const NmsPlan& plan, cudaStream_t stream) {
  return dispatch(kernel.nms.source.dtype, [&](auto zero) {
    return launch_select_layout<PredictionLayout<decltype(zero)>>(kernel, plan, stream);
  });
}

}  // namespace torch_fastdet::core
