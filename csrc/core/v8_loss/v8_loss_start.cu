// The first launch of a v8 loss prepares targets and boxes and sums the class entropy as if there were no targets.
#include "core/v8_loss/v8_loss_device.cuh"
#include "core/v8_loss/v8_loss_launch.h"
#include "core/v8_loss/v8_obb_loss.h"
#include "core/v8_loss/v8_posed_loss.h"

namespace torch_fastdet::core {
namespace {

constexpr int kMostClassBlocks = 1024;

// ---- Targets -------------------------------------------------------------------------------------------------------

// List the targets of an image, in the order of their rows. Every block counts earlier targets and bad rows itself.
template <typename Params>
__device__ void prepare_image(const Params& params, int64_t image) {
  __shared__ int64_t sums[kWarps][4];
  __shared__ int warp_counts[kWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const V8Heads& heads = params.heads;
  const V8Sides sides = v8_sides(params.settings);
  const int64_t claimed = params.num_targets ? *params.num_targets : params.n;
  const int64_t used = claimed < 0 ? 0 : claimed < params.n ? claimed : params.n;
  for (int64_t i = image * kThreads + threadIdx.x; i < 2 * params.n; i += heads.bs * kThreads) {
    params.scratch.best[i] = 0;
  }

  int64_t before = 0, mine = 0, faults = 0, fault_row = 0;
  for (int64_t i = threadIdx.x; i < used; i += kThreads) {
    const float* row = v8_row(params, i);
    if (const int fault = v8_target_fault(row, heads.bs, heads.nc); fault != 0) {
      ++faults;
      const int64_t first = kV8FirstFault - (6 * i + fault - 1);
      fault_row = first > fault_row ? first : fault_row;
      continue;
    }
    V8Target target{};
    if (!v8_read_target(params, row, sides, target)) continue;
    before += target.image < image ? 1 : 0;
    mine += target.image == image ? 1 : 0;
  }
  before = warp_sum(before);
  mine = warp_sum(mine);
  faults = warp_sum(faults);
  fault_row = static_cast<int64_t>(warp_max(static_cast<uint64_t>(fault_row)));
  if (lane == 0) {
    sums[warp][0] = before;
    sums[warp][1] = mine;
    sums[warp][2] = faults;
    sums[warp][3] = fault_row;
  }
  __syncthreads();
  before = mine = faults = fault_row = 0;
  for (int i = 0; i < kWarps; ++i) {
    before += sums[i][0];
    mine += sums[i][1];
    faults += sums[i][2];
    fault_row = sums[i][3] > fault_row ? sums[i][3] : fault_row;
  }
  if (threadIdx.x == 0) {
    params.scratch.first_target[image] = before;
    if (image == heads.bs - 1) params.scratch.first_target[heads.bs] = before + mine;
    if (image == 0) {
      params.status[0] = faults;
      params.status[1] = fault_row;
      params.status[2] = claimed == used ? 0 : claimed - params.n;
      params.status[3] = 0;
    }
  }

  int64_t next = before;
  for (int64_t start = 0; start < used; start += kThreads) {
    const int64_t i = start + threadIdx.x;
    V8Target target{};
    bool take = false;
    if (i < used) {
      const float* row = v8_row(params, i);
      take = v8_target_fault(row, heads.bs, heads.nc) == 0 && v8_read_target(params, row, sides, target) &&
             target.image == image;
    }
    const unsigned taken = __ballot_sync(kFullWarp, take);
    if (lane == 0) warp_counts[warp] = __popc(taken);
    __syncthreads();
    int64_t place = next + __popc(taken & ((1u << lane) - 1));
    for (int other = 0; other < kWarps; ++other) {
      if (other < warp) place += warp_counts[other];
      next += warp_counts[other];
    }
    if (take) {
      target.row = static_cast<int32_t>(i);
      params.scratch.targets[place] = target;
    }
    __syncthreads();
  }
}

// ---- Boxes and classes of all anchors ------------------------------------------------------------------------------

template <typename scalar_t, typename Params>
__device__ void decode_anchor(const Params& params, int64_t anchor) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  if (anchor >= heads.bs * heads.anchors) return;
  params.scratch.owner[anchor] = 0;
  const V8Anchor at = v8_anchor(heads, anchor % heads.anchors);
  T distance[kSides];
#pragma unroll
  for (int side = 0; side < kSides; ++side) {
    distance[side] = v8_side<T>(heads.reg_max, side_logits<scalar_t>(heads, anchor / heads.anchors, at, side)).distance;
  }
  static_cast<CornerBox<T>*>(params.scratch.boxes)[anchor] =
      v8_place_box<scalar_t>(params, anchor / heads.anchors, anchor % heads.anchors, at.column, at.row,
                             T(heads.levels[at.level].stride), distance);
}

// Return this lane's share of a piece's class entropies if all classes are negative.
template <typename scalar_t>
__device__ arithmetic_t<scalar_t> class_sum(const V8LossParams& params, const V8Tensor& tensor, int64_t piece) {
  using T = arithmetic_t<scalar_t>;
  using Pack = Vector<scalar_t>;
  const auto* logits = static_cast<const scalar_t*>(tensor.logits);
  const void* weights = params.class_weights;
  const int boxes = tensor.box_channels;
  T sum = 0;
  visit_piece<Pack::kSize>(
      tensor, piece, boxes, params.heads.bs * tensor.anchors * tensor.channels,
      [&](int64_t e, int channel) {
        if (channel < boxes) return;
        const Pack pack = *reinterpret_cast<const Pack*>(logits + e);
        const int next = tensor.layout == V8Layout::kRows ? 1 : 0;  // step from one element's channel to the next one's
#pragma unroll
        for (int i = 0; i < Pack::kSize; ++i) {
          const T entropy = v8_softplus(to_arithmetic(pack.x[i]));
          sum += weights ? entropy * class_weight<T>(weights, channel - boxes + i * next) : entropy;
        }
      },
      [&](int64_t e, int channel) {
        if (channel < boxes) return;
        const T entropy = v8_softplus(to_arithmetic(logits[logit_of_element(tensor, e, channel)]));
        sum += entropy * class_weight<T>(weights, channel - boxes);
      });
  return sum;
}

template <typename scalar_t>
__device__ void sum_classes(const V8LossParams& params, int64_t block, int64_t blocks) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const int warp = threadIdx.x / kWarp;
  T sum = 0;
  int64_t first = 0;  // number of pieces of the preceding tensors
  for (int t = 0; t < heads.num_tensors; ++t) {
    const V8Tensor& tensor = heads.tensors[t];
    const int64_t end = first + class_pieces(tensor, heads.bs), stride = blocks * kWarps;
    int64_t piece = block * kWarps + warp;
    if (piece < first) piece += ceil_div(first - piece, stride) * stride;
    for (; piece < end; piece += stride) sum += class_sum<scalar_t>(params, tensor, piece - first);
    first = end;
  }
  sum = sum_of_warps<kWarps>(warp_sum(sum));
  if (threadIdx.x == 0) static_cast<T*>(params.scratch.class_partials)[block] = sum;
}

__host__ __device__ int64_t decode_blocks(const V8Heads& heads) {
  return ceil_div(heads.bs * heads.anchors, kThreads);
}

template <typename scalar_t, typename Params>
__global__ void __launch_bounds__(kThreads) start_kernel(const __grid_constant__ Params params) {
  int64_t block = blockIdx.x;
  if (block < params.heads.bs) return prepare_image(params, block);
  block -= params.heads.bs;
  const int64_t decoding = decode_blocks(params.heads);
  if (block < decoding) return decode_anchor<scalar_t>(params, block * kThreads + threadIdx.x);
  sum_classes<scalar_t>(params, block - decoding, gridDim.x - params.heads.bs - decoding);
}

}  // namespace

int64_t v8_class_blocks(const V8LossParams& params) {
  int64_t pieces = 0;
  for (int t = 0; t < params.heads.num_tensors; ++t) pieces += class_pieces(params.heads.tensors[t], params.heads.bs);
  const int64_t blocks = ceil_div(pieces, kWarps);
  return blocks < kMostClassBlocks ? blocks : kMostClassBlocks;
}

template <typename Params>
cudaError_t launch_v8_start(const Params& params, int64_t class_blocks, cudaStream_t stream) {
  return dispatch(params.heads.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    const auto blocks = static_cast<unsigned>(params.heads.bs + decode_blocks(params.heads) + class_blocks);
    start_kernel<scalar_t, Params><<<blocks, kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}
template cudaError_t launch_v8_start(const V8LossParams&, int64_t, cudaStream_t);
template cudaError_t launch_v8_start(const V8ObbLossParams&, int64_t, cudaStream_t);
template cudaError_t launch_v8_start(const V8PosedLossParams&, int64_t, cudaStream_t);

}  // namespace torch_fastdet::core
