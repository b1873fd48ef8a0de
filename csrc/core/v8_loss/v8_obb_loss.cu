// Compute the loss of oriented boxes on the GPU with the detection loss's targets, boxes and assignment. One thread
// computes each slot's terms and one block adds them. Backward writes the dense gradients, then each slot's.
#include "core/v8_loss/v8_loss_device.cuh"
#include "core/v8_loss/v8_loss_launch.h"
#include "core/v8_loss/v8_obb_loss.h"

namespace torch_fastdet::core {
namespace {

constexpr int kSlotThreads = 64;  // there are few slots, so use many blocks
constexpr int kFinishThreads = 1024;

template <typename scalar_t>
__global__ void __launch_bounds__(kSlotThreads) obb_terms_kernel(const __grid_constant__ V8ObbLossParams params) {
  using T = arithmetic_t<scalar_t>;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kSlotThreads + threadIdx.x;
  T terms[kV8ObbTerms] = {};
  if (slot < params.n * params.topk) v8_obb_terms<scalar_t>(params, slot, terms);
  block_sum<kSlotThreads>(terms);
  if (threadIdx.x != 0) return;
  T* out = static_cast<T*>(params.scratch.slot_partials) + static_cast<int64_t>(blockIdx.x) * kV8ObbTerms;
#pragma unroll
  for (int term = 0; term < kV8ObbTerms; ++term) out[term] = terms[term];
}

template <typename T>
__global__ void __launch_bounds__(kFinishThreads)
    obb_finish_kernel(const __grid_constant__ V8ObbLossParams params, int64_t slot_blocks, int64_t class_blocks) {
  double sums[kV8ObbTerms] = {};
  for (int64_t i = threadIdx.x; i < slot_blocks; i += kFinishThreads) {
    for (int term = 0; term < kV8ObbTerms; ++term) {
      sums[term] += static_cast<double>(static_cast<const T*>(params.scratch.slot_partials)[i * kV8ObbTerms + term]);
    }
  }
  for (int64_t i = threadIdx.x; i < class_blocks; i += kFinishThreads) {
    sums[2] += static_cast<double>(static_cast<const T*>(params.scratch.class_partials)[i]);
  }
  block_sum<kFinishThreads>(sums);
  if (threadIdx.x == 0) v8_obb_finish<T>(params, sums);
}

template <typename scalar_t>
__global__ void __launch_bounds__(kSlotThreads)
    obb_gradient_kernel(const __grid_constant__ V8ObbLossBackwardParams params) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kSlotThreads + threadIdx.x;
  if (slot < params.n * params.topk) v8_obb_gradient<scalar_t>(params, slot);
}

}  // namespace

int64_t v8_obb_slot_blocks(const V8ObbLossParams& params) {
  return ceil_div(params.n * params.topk, kSlotThreads);
}

cudaError_t launch_v8_obb_loss(const V8ObbLossParams& params, cudaStream_t stream) {
  const int64_t class_blocks = v8_class_blocks(params), slot_blocks = v8_obb_slot_blocks(params);
  cudaError_t error = launch_v8_start(params, class_blocks, stream);
  if (error == cudaSuccess && slot_blocks > 0) error = launch_v8_assign(params, stream);
  if (error != cudaSuccess) return error;
  return dispatch(params.heads.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    if (slot_blocks > 0) {
      obb_terms_kernel<scalar_t><<<static_cast<unsigned>(slot_blocks), kSlotThreads, 0, stream>>>(params);
      if (const cudaError_t failed = cudaGetLastError(); failed != cudaSuccess) return failed;
    }
    obb_finish_kernel<arithmetic_t<scalar_t>><<<1, kFinishThreads, 0, stream>>>(params, slot_blocks, class_blocks);
    return cudaGetLastError();
  });
}

cudaError_t launch_v8_obb_loss_backward(const V8ObbLossBackwardParams& params, cudaStream_t stream) {
  if (const cudaError_t error = launch_v8_dense(params, stream); error != cudaSuccess) return error;
  return dispatch(params.heads.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    const auto bytes = static_cast<size_t>(params.heads.bs * params.heads.anchors) * sizeof(scalar_t);
    const cudaError_t error = cudaMemsetAsync(params.angles.gradient, 0, bytes, stream);
    if (error != cudaSuccess || params.n == 0) return error;
    const auto blocks = static_cast<unsigned>(ceil_div(params.n * params.topk, kSlotThreads));
    obb_gradient_kernel<scalar_t><<<blocks, kSlotThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace torch_fastdet::core
