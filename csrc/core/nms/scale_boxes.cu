// Scale boxes back to original pixels, one box per thread.
#include "core/nms/nms_device.cuh"
#include "core/nms/scale_boxes_math.h"

namespace torch_fastdet::core {

namespace {

template <typename T>
__global__ void __launch_bounds__(256) scale_boxes_kernel(const __grid_constant__ ScaleBoxesParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.images * p.count) scale_one_box<T>(p, i);
}

}  // namespace

cudaError_t launch_scale_boxes(const ScaleBoxesParams& params, cudaStream_t stream) {
  const int64_t boxes = params.images * params.count;
  if (boxes == 0) return cudaSuccess;
  return dispatch(params.dtype, [&](auto zero) {
    scale_boxes_kernel<decltype(zero)><<<static_cast<unsigned>(ceil_div(boxes, 256)), 256, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace torch_fastdet::core
