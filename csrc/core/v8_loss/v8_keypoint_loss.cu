// Compute the pose loss's keypoint parts: a warp computes a slot's terms, one block adds them, a warp writes gradients.
#include "core/v8_loss/v8_keypoint_loss.h"
#include "core/v8_loss/v8_loss_device.cuh"

namespace torch_fastdet::core {
namespace {

constexpr int kFinishThreads = 1024;

template <typename T>
__device__ int visible_keypoints(const V8KeypointProblem& p, const V8KeypointSlot<T>& slot) {
  int visible = 0;
  for (int k = threadIdx.x % kWarp; k < p.keypoints; k += kWarp) visible += v8_keypoint_visible(p, slot.row, k) ? 1 : 0;
  return warp_sum(visible);
}

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) keypoints_kernel(const __grid_constant__ V8KeypointLossParams params) {
  using T = arithmetic_t<scalar_t>;
  const V8KeypointProblem& p = params.problem;
  const int64_t which = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (which >= p.slots || p.slot_anchor[which] < 0) return;
  const auto slot = v8_keypoint_slot<T>(p, which);
  const T share = v8_keypoint_share<T>(p, visible_keypoints(p, slot));
  T sums[2] = {};
  for (int k = threadIdx.x % kWarp; k < p.keypoints; k += kWarp) {
    const bool visible = v8_keypoint_visible(p, slot.row, k);
    const auto logits = keypoint_logits<scalar_t>(p, slot.image, slot.anchor, k);
    T gradient[2];
    const T distance = v8_keypoint_distance(p, slot, k, logits(0), logits(1), gradient);
    sums[0] += share * distance * T(visible ? 1 : 0);
    if (p.columns == 3) sums[1] += v8_softplus(logits(2)) - (visible ? logits(2) : T(0));
  }
  warp_sum(sums);
  if (threadIdx.x % kWarp != 0) return;
  static_cast<T*>(params.partials)[2 * which] = sums[0];
  static_cast<T*>(params.partials)[2 * which + 1] = sums[1];
}

template <typename T>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ V8KeypointLossParams params) {
  const V8KeypointProblem& p = params.problem;
  double sums[3] = {};
  for (int64_t slot = threadIdx.x; slot < p.slots; slot += kFinishThreads) {
    if (p.slot_anchor[slot] < 0) continue;
    sums[0] += static_cast<double>(static_cast<const T*>(params.partials)[2 * slot]);
    sums[1] += static_cast<double>(static_cast<const T*>(params.partials)[2 * slot + 1]);
    sums[2] += 1;
  }
  block_sum<kFinishThreads>(sums);
  if (threadIdx.x != 0) return;
  v8_keypoint_finish<T>(params, sums, sums[2]);
}

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    keypoint_gradient_kernel(const __grid_constant__ V8KeypointLossBackwardParams params) {
  using T = arithmetic_t<scalar_t>;
  const V8KeypointProblem& p = params.problem;
  const int64_t which = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (which >= p.slots || p.slot_anchor[which] < 0) return;
  const auto slot = v8_keypoint_slot<T>(p, which);
  const T* grads = static_cast<const T*>(params.grad_loss);
  const T* scales = static_cast<const T*>(params.scales);
  const T by_distance = grads[0] * scales[0] * v8_keypoint_share<T>(p, visible_keypoints(p, slot));
  const T by_visibility = grads[params.grad_stride] * scales[1];
  for (int k = threadIdx.x % kWarp; k < p.keypoints; k += kWarp) {
    v8_keypoint_gradient<scalar_t>(params, slot, k, by_distance, by_visibility);
  }
}

}  // namespace

cudaError_t launch_v8_keypoint_loss(const V8KeypointLossParams& params, cudaStream_t stream) {
  return dispatch(params.problem.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    if (params.problem.slots > 0) {
      const auto blocks = static_cast<unsigned>(ceil_div(params.problem.slots, kWarps));
      keypoints_kernel<scalar_t><<<blocks, kThreads, 0, stream>>>(params);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    finish_kernel<arithmetic_t<scalar_t>><<<1, kFinishThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t launch_v8_keypoint_loss_backward(const V8KeypointLossBackwardParams& params, cudaStream_t stream) {
  const V8KeypointProblem& p = params.problem;
  return dispatch(p.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    const auto bytes = static_cast<size_t>(p.heads.bs * p.keypoints * p.columns * p.heads.anchors) * sizeof(scalar_t);
    const cudaError_t error = cudaMemsetAsync(params.gradient, 0, bytes, stream);
    if (error != cudaSuccess || p.slots == 0) return error;
    const auto blocks = static_cast<unsigned>(ceil_div(p.slots, kWarps));
    keypoint_gradient_kernel<scalar_t><<<blocks, kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace torch_fastdet::core
