// Provide helpers to all kernels: warps, sums over a warp or block in a fixed order, wide accesses, shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/common/host_device.h"

namespace torch_fastdet::core {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// Add each of kValues values over the lanes of a whole warp. Every lane gets the same sums, bit for bit.
template <typename T, int kValues>
__device__ __forceinline__ void warp_sum(T (&values)[kValues]) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) values[k] += __shfl_xor_sync(kFullWarp, values[k], step);
  }
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

// Sum each of kValues values over a block as a tree, for thread 0. Every thread must call it; calls may be adjacent.
template <int kThreads, typename T, int kValues>
__device__ __forceinline__ void block_sum(T (&values)[kValues]) {
  static_assert(kThreads % kWarp == 0 && kThreads <= kWarp * kWarp, "one warp adds what the warps leave");
  constexpr int kWarps = kThreads / kWarp;
  __shared__ T warps[kWarps][kValues];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  warp_sum(values);
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) warps[warp][k] = values[k];
  }
  __syncthreads();
  if (warp == 0) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) values[k] = lane < kWarps ? warps[lane][k] : T(0);
    warp_sum(values);
  }
  __syncthreads();
}

// Add lane 0's value of each warp in the order of warps, for thread 0. Every thread must call it, after synchronising.
template <int kWarps, typename T>
__device__ __forceinline__ T sum_of_warps(T value) {
  __shared__ T warps[kWarps];
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  T sum = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWarps; ++i) sum += warps[i];
  }
  return sum;
}

// Hold kCount neighbouring elements that one access moves, by default 16 bytes.
template <typename T, int kCount = 16 / sizeof(T)>
struct alignas(kCount * sizeof(T) > 16 ? 16 : kCount * sizeof(T)) Vector {
  static constexpr int kSize = kCount;
  T x[kCount];
};

// Return whether Vector<T> may be read and written at `pointer`. Null is aligned.
__device__ __forceinline__ bool is_vector_aligned(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0;
}

// Let a kernel use `bytes` of dynamic shared memory (which must be requested above 48 KiB), and prefer it to L1.
template <typename Kernel>
cudaError_t allow_shared(Kernel* kernel, int bytes) {
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
    return error;
  }
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

}  // namespace torch_fastdet::core
