// Compute the IoU of pairs of boxes, its loss, and the gradients of both on the GPU (see bbox_iou.h).
#include <cooperative_groups.h>

#include <algorithm>
#include <atomic>

#include "core/boxes/bbox_iou.h"
#include "core/common/device.cuh"
#include "core/common/dtype.cuh"

namespace torch_fastdet::core {
namespace {

constexpr int kThreads = 256;
constexpr int kLossThreads = 1024;
// A row that sums at least this many pairs gets its own block, other rows get one thread each.
constexpr int64_t kBlockReduce = 64;
constexpr int64_t kMaxBlocks = 1 << 30;

template <typename T>
using Row = Vector<T, 4>;

template <typename Stored, typename T>
__device__ void load_row(const BoxesIn& boxes, int64_t offset, T (&out)[4]) {
  const Stored* p = static_cast<const Stored*>(boxes.data) + offset;
  Row<Stored> row;
  if (boxes.vectorised) {
    row = *reinterpret_cast<const Row<Stored>*>(p);
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) row.x[c] = p[c * boxes.coord_stride];
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) out[c] = static_cast<T>(to_arithmetic(row.x[c]));
}

// The storage type is selected at run time and is the same for a whole grid: sixteen combinations would otherwise be
// sixteen copies of each kernel. T = double is chosen if and only if one of the tensors is float64.
template <typename T>
__device__ void load_boxes(const BoxesIn& boxes, int64_t offset, T (&out)[4]) {
  dispatch(boxes.dtype, [&](auto zero) {
    if constexpr (sizeof(zero) <= sizeof(T)) load_row<decltype(zero)>(boxes, offset, out);
  });
}

template <typename Stored, typename T>
__device__ void store_row_as(void* data, int64_t row, const T (&value)[4]) {
  Row<Stored> packed;
#pragma unroll
  for (int c = 0; c < 4; ++c) packed.x[c] = from_arithmetic<Stored>(static_cast<arithmetic_t<Stored>>(value[c]));
  static_cast<Row<Stored>*>(data)[row] = packed;
}

// Gradients are newly allocated contiguous tensors, so a row is always one aligned vector.
template <typename T>
__device__ void store_row(void* data, DType dtype, int64_t row, const T (&value)[4]) {
  dispatch(dtype, [&](auto zero) {
    if constexpr (sizeof(zero) <= sizeof(T)) store_row_as<decltype(zero)>(data, row, value);
  });
}

template <IouKind kKind, typename T>
__device__ T pair_iou(const BoxesIn& box1, const BoxesIn& box2, const BroadcastPlan<2>& pairs, const IouConfig& config,
                      int64_t i) {
  int64_t offset[2];
  broadcast_offsets(pairs, i, offset);
  T a[4];
  T b[4];
  load_boxes(box1, offset[0], a);
  load_boxes(box2, offset[1], b);
  const T eps = static_cast<T>(config.eps);
  return box_iou<kKind>(make_box(a, config.xywh, eps), make_box(b, config.xywh, eps), eps);
}

template <IouKind kKind, typename T>
__global__ void __launch_bounds__(kThreads) bbox_iou_kernel(const __grid_constant__ BboxIouParams p) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.pairs.numel; i += step) {
    const T iou = pair_iou<kKind, T>(p.box1, p.box2, p.pairs, p.config, i);
    store_element(p.out, p.out_dtype, i, p.loss ? T(1) - iou : iou);
  }
}

template <typename T>
__device__ void store_loss(const IouLossParams& p, T sum) {
  store_element(p.out, p.out_dtype, 0, p.reduction == IouReduction::kMean ? sum / static_cast<T>(p.pairs.numel) : sum);
}

template <IouKind kKind, typename T>
__global__ void __launch_bounds__(kLossThreads) iou_loss_kernel(const __grid_constant__ IouLossParams p) {
  const bool fold_in_cluster = gridDim.x > 1 && p.partial == nullptr;
#if __CUDA_ARCH__ >= 900
  // The first block must have started before another writes to its shared memory. No block waits for that here.
  if (fold_in_cluster) cooperative_groups::this_cluster().barrier_arrive();
#endif
  // Assign pairs to blocks round-robin by warps, so that a few pairs are spread over all blocks.
  const int lane = threadIdx.x % kWarp;
  const int64_t first = (static_cast<int64_t>(threadIdx.x / kWarp) * gridDim.x + blockIdx.x) * kWarp + lane;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kLossThreads;
  T sum[1] = {T(0)};
  for (int64_t i = first; i < p.pairs.numel; i += step) {
    sum[0] += T(1) - pair_iou<kKind, T>(p.box1, p.box2, p.pairs, p.config, i);
  }
  block_sum<kLossThreads>(sum);
  if (gridDim.x == 1) {
    if (threadIdx.x == 0) store_loss(p, sum[0]);
    return;
  }
  if (!fold_in_cluster) {
    if (threadIdx.x == 0) static_cast<T*>(p.partial)[blockIdx.x] = sum[0];
    return;
  }
#if __CUDA_ARCH__ >= 900
  __shared__ T blocks[kWarp];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_wait();
  if (threadIdx.x == 0) cluster.map_shared_rank(blocks, 0)[blockIdx.x] = sum[0];
  cluster.sync();
  if (blockIdx.x == 0 && threadIdx.x < kWarp) {
    const T total = warp_sum(lane < static_cast<int>(gridDim.x) ? blocks[lane] : T(0));
    if (lane == 0) store_loss(p, total);
  }
#endif
}

template <typename T>
__global__ void __launch_bounds__(kLossThreads)
    iou_loss_fold_kernel(const __grid_constant__ IouLossParams p, int partials) {
  static_assert(kLossMaxBlocks <= kLossThreads, "one thread takes one block's sum");
  T sum[1] = {static_cast<int>(threadIdx.x) < partials ? static_cast<const T*>(p.partial)[threadIdx.x] : T(0)};
  block_sum<kLossThreads>(sum);
  if (threadIdx.x == 0) store_loss(p, sum[0]);
}

template <IouKind kKind, typename T>
__device__ void pair_grad(const IouBackwardParams& p, const IouGradPass& pass, int64_t i, T (&grad1)[4],
                          T (&grad2)[4]) {
  int64_t offset[3];
  broadcast_offsets(pass.pairs, i, offset);
  T a[4];
  T b[4];
  load_boxes(p.box1, offset[0], a);
  load_boxes(p.box2, offset[1], b);
  const T grad = load_element<T>(p.grad, p.grad_dtype, offset[2]) * static_cast<T>(p.grad_scale);
  const T eps = static_cast<T>(p.config.eps);
  const bool xywh = p.config.xywh;
  Box<T> grad_a;
  Box<T> grad_b;
  box_iou_grad<kKind>(make_box(a, xywh, eps), make_box(b, xywh, eps), eps, grad, grad_a, grad_b);
  fold_box_grad(grad_a, xywh, grad1);
  fold_box_grad(grad_b, xywh, grad2);
}

template <typename T>
__device__ void store_grads(const IouBackwardParams& p, const IouGradPass& pass, int64_t row, const T (&grad1)[4],
                            const T (&grad2)[4]) {
  if (pass.grad1) store_row(pass.grad1, p.box1.dtype, row, grad1);
  if (pass.grad2) store_row(pass.grad2, p.box2.dtype, row, grad2);
}

// This block is number `block` of the `blocks` blocks that work on this pass.
template <IouKind kKind, typename T>
__device__ void run_pass(const IouBackwardParams& p, const IouGradPass& pass, int64_t block, int64_t blocks) {
  if (pass.reduce < kBlockReduce) {
    for (int64_t row = block * kThreads + threadIdx.x; row < pass.rows; row += blocks * kThreads) {
      T sum1[4] = {T(0), T(0), T(0), T(0)};
      T sum2[4] = {T(0), T(0), T(0), T(0)};
      for (int64_t j = 0; j < pass.reduce; ++j) {  // no iteration if the other tensor is empty
        T grad1[4];
        T grad2[4];
        pair_grad<kKind>(p, pass, row * pass.reduce + j, grad1, grad2);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          sum1[c] += grad1[c];
          sum2[c] += grad2[c];
        }
      }
      store_grads(p, pass, row, sum1, sum2);
    }
    return;
  }
  // Only one of the two gradients is needed here, as the other tensor has its own pass.
  const bool first = pass.grad1 != nullptr;
  for (int64_t row = block; row < pass.rows; row += blocks) {
    T sum[4] = {T(0), T(0), T(0), T(0)};
    for (int64_t j = threadIdx.x; j < pass.reduce; j += kThreads) {
      T grad1[4];
      T grad2[4];
      pair_grad<kKind>(p, pass, row * pass.reduce + j, grad1, grad2);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += first ? grad1[c] : grad2[c];
    }
    block_sum<kThreads>(sum);
    if (threadIdx.x == 0) store_grads(p, pass, row, sum, sum);
  }
}

template <IouKind kKind, typename T>
__global__ void __launch_bounds__(kThreads)
    iou_backward_kernel(const __grid_constant__ IouBackwardParams p, int64_t first_pass_blocks) {
  const int64_t block = blockIdx.x;
  // Call run_pass once and not once per branch, because it is the kernel's whole body.
  const bool second = block >= first_pass_blocks;
  const IouGradPass& pass = p.pass[second ? 1 : 0];
  run_pass<kKind, T>(p, pass, second ? block - first_pass_blocks : block,
                     second ? gridDim.x - first_pass_blocks : first_pass_blocks);
}

// Call f, which launches a kernel, as with_kind does.
template <typename Params, typename F>
cudaError_t dispatch_kind(const Params& params, F&& f) {
  with_kind(params.config.kind, params.box1, params.box2, f);
  return cudaGetLastError();
}

int64_t pass_blocks(const IouGradPass& pass) {
  const int64_t blocks = pass.reduce < kBlockReduce ? ceil_div(pass.rows, kThreads) : pass.rows;
  return std::min(blocks, kMaxBlocks);
}

}  // namespace

cudaError_t launch_bbox_iou(const BboxIouParams& params, cudaStream_t stream) {
  if (params.pairs.numel == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>(std::min(ceil_div(params.pairs.numel, kThreads), kMaxBlocks));
  return dispatch_kind(params, [&](auto kind, auto zero) {
    bbox_iou_kernel<decltype(kind)::value, decltype(zero)><<<blocks, kThreads, 0, stream>>>(params);
  });
}

cudaError_t iou_loss_clusters(bool& clusters) {
  // Ask the kernel and not the device: a build for an older architecture runs on a newer GPU through its PTX.
  enum State : int { kUnknown, kAbsent, kPresent };
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  const int state = device < kDevices ? known[device].load(std::memory_order_relaxed) : kUnknown;
  clusters = state == kPresent;
  if (state != kUnknown) return cudaSuccess;
  cudaFuncAttributes attributes = {};
  if (const cudaError_t error = cudaFuncGetAttributes(&attributes, iou_loss_kernel<IouKind::kCiou, float>))
    return error;
  clusters = attributes.ptxVersion >= 90;
  if (device < kDevices) known[device].store(clusters ? kPresent : kAbsent, std::memory_order_relaxed);
  return cudaSuccess;
}

cudaError_t launch_iou_loss(const IouLossParams& params, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(iou_loss_blocks(params.pairs.numel));
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kLossThreads);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = blocks > 1 && params.partial == nullptr ? 1 : 0;
  return dispatch_kind(params, [&](auto kind, auto zero) {
    using T = decltype(zero);
    cudaLaunchKernelEx(&config, iou_loss_kernel<decltype(kind)::value, T>, params);
    if (params.partial) iou_loss_fold_kernel<T><<<1, kLossThreads, 0, stream>>>(params, static_cast<int>(blocks));
  });
}

cudaError_t launch_iou_backward(const IouBackwardParams& params, cudaStream_t stream) {
  const int64_t first = params.passes > 0 ? pass_blocks(params.pass[0]) : 0;
  const int64_t second = params.passes > 1 ? pass_blocks(params.pass[1]) : 0;
  if (first + second == 0) return cudaSuccess;
  return dispatch_kind(params, [&](auto kind, auto zero) {
    iou_backward_kernel<decltype(kind)::value, decltype(zero)>
        <<<static_cast<unsigned>(first + second), kThreads, 0, stream>>>(params, first);
  });
}

}  // namespace torch_fastdet::core
