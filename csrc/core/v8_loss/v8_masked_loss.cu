// Compute YOLO26's mask overlaps: a block lists a target's best anchors and its area, then a block takes each anchor.
#include "core/v8_loss/v8_masked_loss.h"

#include "core/v8_loss/v8_best_anchors.cuh"
#include "core/v8_loss/v8_loss_launch.h"

namespace torch_fastdet::core {
namespace {

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) near_kernel(const __grid_constant__ V8MaskedLossParams params) {
  const V8Heads& heads = params.heads;
  const V8MaskProblem& p = params.masks;
  if (blockIdx.x >= params.scratch.first_target[heads.bs]) return;
  const V8Target target = params.scratch.targets[blockIdx.x];
  int64_t* anchors = params.near_anchor + int64_t{target.row} * params.near;
  for (int i = threadIdx.x; i < params.near; i += kThreads) anchors[i] = -1;
  best_anchors(
      params, target, params.near, [&](const V8Anchor& at) { return v8_near_key<scalar_t>(params, target, at); },
      [&](int place, uint64_t key) { anchors[place] = v8_key_index(key); });
  int before = 0;
  if (p.overlap) {
    for (int64_t row = threadIdx.x; row < target.row; row += kThreads) {
      before += v8_row_image(params.targets, row, heads.bs) == target.image ? 1 : 0;
    }
    int sums[1] = {before};
    __shared__ int all;
    block_sum<kThreads>(sums);
    if (threadIdx.x == 0) all = sums[0];
    __syncthreads();
    before = all;
  }
  float area[1] = {};
  for (int64_t i = threadIdx.x; i < p.height * p.width; i += kThreads) {
    area[0] += v8_near_mask(params, target.image, target.row, before + 1, i / p.width, i % p.width);
  }
  block_sum<kThreads>(area);
  if (threadIdx.x != 0) return;
  params.mask_area[target.row] = area[0];
  params.mask_number[target.row] = before + 1;
}

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) compare_kernel(const __grid_constant__ V8MaskedLossParams params) {
  using T = arithmetic_t<scalar_t>;
  __shared__ T coefficients[kV8MostMaskChannels];
  const V8MaskProblem& p = params.masks;
  const int64_t which = blockIdx.x / params.near;
  if (which >= params.scratch.first_target[params.heads.bs]) return;
  const V8Target& target = params.scratch.targets[which];
  const int64_t place = int64_t{target.row} * params.near + blockIdx.x % params.near;
  const int64_t anchor = params.near_anchor[place];
  if (anchor < 0) return;
  const int64_t image = target.image;
  const V8Coefficients& c = p.coefficients;
  for (int i = threadIdx.x; i < p.channels; i += kThreads) {
    coefficients[i] =
        to_arithmetic(static_cast<const scalar_t*>(c.at)[image * c.stride_b + i * c.stride_c + anchor * c.stride_a]);
  }
  __syncthreads();
  const V8Pixels box = v8_box_pixels(
      params, static_cast<const CornerBox<T>*>(params.scratch.boxes)[image * params.heads.anchors + anchor]);
  const int width = box.x1 - box.x0, count = width * (box.y1 - box.y0);
  const int32_t number = params.mask_number[target.row];
  float sums[2] = {};  // of both masks, of the predicted mask
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int64_t y = box.y0 + i / width, x = box.x0 + i % width;
    const auto* at = static_cast<const scalar_t*>(p.protos.at) + image * p.protos.stride_b + y * p.protos.stride_y +
                     x * p.protos.stride_x;
    T logit = 0;
    for (int k = 0; k < p.channels; ++k) logit += coefficients[k] * to_arithmetic(at[k * p.protos.stride_c]);
    if (!(logit > T(0))) continue;
    sums[0] += v8_near_mask(params, image, target.row, number, y, x);
    sums[1] += 1;
  }
  block_sum<kThreads>(sums);
  if (threadIdx.x != 0) return;
  static_cast<T*>(params.near_overlap)[place] = v8_mask_iou(T(sums[0]), T(sums[1]), T(params.mask_area[target.row]));
}

}  // namespace

cudaError_t launch_v8_masked_loss(const V8MaskedLossParams& params, cudaStream_t stream) {
  const int64_t class_blocks = v8_class_blocks(params);
  cudaError_t error = launch_v8_start<V8LossParams>(params, class_blocks, stream);
  if (params.n * params.topk > 0) {
    if (error == cudaSuccess) {
      error = dispatch(params.heads.dtype, [&](auto zero) {
        using scalar_t = decltype(zero);
        near_kernel<scalar_t><<<static_cast<unsigned>(params.n), kThreads, 0, stream>>>(params);
        if (const cudaError_t failed = cudaGetLastError(); failed != cudaSuccess) return failed;
        compare_kernel<scalar_t><<<static_cast<unsigned>(params.n * params.near), kThreads, 0, stream>>>(params);
        return cudaGetLastError();
      });
    }
    if (error == cudaSuccess) error = launch_v8_assign(params, stream);
    if (error == cudaSuccess) error = launch_v8_terms(params, stream);
  }
  return error == cudaSuccess ? launch_v8_finish(params, class_blocks, stream) : error;
}

}  // namespace torch_fastdet::core
