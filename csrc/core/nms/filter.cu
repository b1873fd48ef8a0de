// Select the rows above a threshold and keep their order. Each image has one block.
#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/nms/filter.h"

namespace torch_fastdet::core {

namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) filter_kernel(const __grid_constant__ FilterParams p) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ int passing[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t image = blockIdx.x;
  int64_t found = 0;
  for (int64_t first = 0; first < p.count && found < p.capacity; first += kThreads) {
    const int64_t row = first + threadIdx.x;
    const bool passes = row < p.count && passes_filter<T>(p, image, row);
    const unsigned lanes = __ballot_sync(kFullWarp, passes);
    if (lane == 0) passing[warp] = __popc(lanes);
    __syncthreads();
    int64_t place = found + __popc(lanes & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += passing[w];
      found += passing[w];
    }
    __syncthreads();
    if (passes && place < p.capacity) write_filtered<T>(p, image, row, place);
  }
  if (found > p.capacity) found = p.capacity;
  if (threadIdx.x == 0) p.output.counts[image] = found;
  for (int64_t place = found + threadIdx.x; place < p.capacity; place += kThreads) clear_filtered<T>(p, image, place);
}

}  // namespace

cudaError_t launch_filter(const FilterParams& params, cudaStream_t stream) {
  if (params.images == 0) return cudaSuccess;
  return dispatch(params.dtype, [&](auto zero) {
    filter_kernel<decltype(zero)><<<static_cast<unsigned>(params.images), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace torch_fastdet::core
