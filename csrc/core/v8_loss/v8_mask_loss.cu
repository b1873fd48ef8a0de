// Compute the segmentation loss's mask part. Forward, a block lists the positives of each group (an image's level),
// blocks share the pixels of each positive's box and sum entropies and their gradient by the coefficients, and one
// launch adds these. Backward, those sums give the coefficients' gradients, and a block for each tile of an image's
// prototypes walks over its positives in a fixed order, with the tile's gradients in registers.
#include "core/v8_loss/v8_loss_device.cuh"
#include "core/v8_loss/v8_mask_loss.h"

namespace torch_fastdet::core {
namespace {

constexpr int kFinishThreads = 1024;
constexpr int kTileWidth = 32, kTileHeight = kThreads / kTileWidth;
constexpr int kGroup = 8;  // positives whose coefficients are in shared memory at a time

// Return the places, from `next` on, of the threads whose `take` is true, and advance `next` past them.
__device__ int64_t ordered_place(bool take, int64_t& next) {
  __shared__ int counts[kWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const unsigned taken = __ballot_sync(kFullWarp, take);
  __syncthreads();  // the counts of the previous call have been read
  if (lane == 0) counts[warp] = __popc(taken);
  __syncthreads();
  int64_t place = next + __popc(taken & ((1u << lane) - 1));
  for (int other = 0; other < kWarps; ++other) {
    if (other < warp) place += counts[other];
    next += counts[other];
  }
  return place;
}

// Each block lists the positives of one group.
__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ V8MaskLossParams params) {
  __shared__ int64_t of_warps[kWarps][2];
  const V8MaskProblem& p = params.problem;
  const int64_t level = blockIdx.x / p.bs, image = blockIdx.x % p.bs;
  const int64_t first_slot = level * (params.slots / p.levels), end_slot = first_slot + params.slots / p.levels;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int32_t* numbers = params.numbers + level * params.n;
  if (p.overlap) {
    const int64_t claimed = params.num_targets ? *params.num_targets : params.n;
    const int64_t used = claimed < 0 ? 0 : claimed < params.n ? claimed : params.n;
    int64_t number = 1;
    for (int64_t start = 0; start < used; start += kThreads) {
      const int64_t row = start + threadIdx.x;
      const bool mine = row < used && v8_row_image(params.targets, row, p.bs) == image;
      const int64_t place = ordered_place(mine, number);
      if (mine) numbers[row] = static_cast<int32_t>(place);
    }
  }
  int64_t before = 0, mine = 0;
  for (int64_t slot = threadIdx.x; slot < end_slot; slot += kThreads) {
    const int64_t of_slot = v8_mask_image(params, slot);
    if (of_slot < 0) continue;
    before += slot < first_slot || of_slot < image ? 1 : 0;
    mine += slot >= first_slot && of_slot == image ? 1 : 0;
  }
  before = warp_sum(before);
  mine = warp_sum(mine);
  if (lane == 0) {
    of_warps[warp][0] = before;
    of_warps[warp][1] = mine;
  }
  __syncthreads();  // the numbers of the rows are written, too
  before = mine = 0;
  for (int i = 0; i < kWarps; ++i) {
    before += of_warps[i][0];
    mine += of_warps[i][1];
  }
  if (threadIdx.x == 0) {
    params.first[blockIdx.x] = before;
    if (blockIdx.x + 1 == gridDim.x) params.first[gridDim.x] = before + mine;
  }
  const int64_t end = before + mine;
  int64_t next = before;
  for (int64_t start = first_slot; start < end_slot && next < end; start += kThreads) {
    const int64_t slot = start + threadIdx.x;
    const bool take = slot < end_slot && v8_mask_image(params, slot) == image;
    const int64_t place = ordered_place(take, next);
    if (!take) continue;
    const int32_t number = p.overlap ? numbers[v8_mask_row(params, slot)] : 0;
    params.positives[place] = v8_mask_positive(params, slot, number, mine);
  }
}

template <typename scalar_t>
__device__ arithmetic_t<scalar_t> coefficient(const V8MaskProblem& p, const V8MaskPositive& positive, int channel) {
  const V8Coefficients& c = p.coefficients;
  return to_arithmetic(
      static_cast<const scalar_t*>(c.at)[positive.anchor / p.anchors * c.stride_b + channel * c.stride_c +
                                         positive.anchor % p.anchors * c.stride_a]);
}

template <int kMost, typename scalar_t>
__device__ void load_pixel(const V8MaskProblem& p, int64_t image, int64_t y, int64_t x,
                           arithmetic_t<scalar_t> (&pixel)[kMost]) {
  const V8Prototypes& protos = p.protos;
  const auto* at =
      static_cast<const scalar_t*>(protos.at) + image * protos.stride_b + y * protos.stride_y + x * protos.stride_x;
#pragma unroll
  for (int c = 0; c < kMost; ++c) {
    pixel[c] = c < p.channels ? to_arithmetic(at[c * protos.stride_c]) : arithmetic_t<scalar_t>(0);
  }
}

template <int kMost, typename T>
__device__ T dot(const T (&a)[kMost], const T* b) {
  T sum = 0;
#pragma unroll
  for (int c = 0; c < kMost; ++c) sum += a[c] * b[c];
  return sum;
}

// Add each of 32 values over a warp; lane i gets the sum of value i. Each step exchanges half of the values.
template <typename T>
__device__ T transposed_sum(T* values) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) {
    const bool upper = (lane & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const T sent = upper ? values[i] : values[i + half];
      values[i] = (upper ? values[i + half] : values[i]) + __shfl_xor_sync(kFullWarp, sent, half);
    }
  }
  return values[0];
}

// Each positive has v8_mask_parts blocks, of which those that its box needs do work.
template <int kMost, typename scalar_t>
__global__ void __launch_bounds__(kThreads) pixels_kernel(const __grid_constant__ V8MaskLossParams params) {
  using T = arithmetic_t<scalar_t>;
  __shared__ T coefficients[kMost], of_warps[kWarps][kMost];
  const V8MaskProblem& p = params.problem;
  const int64_t all = v8_mask_parts(params.slots), which = blockIdx.x / all, part = blockIdx.x % all;
  if (which >= params.first[p.levels * p.bs]) return;
  const V8MaskPositive positive = params.positives[which];
  const int64_t parts = v8_busy_parts(positive, all);
  if (part >= parts) return;
  for (int c = threadIdx.x; c < kMost; c += kThreads) {
    coefficients[c] = c < p.channels ? coefficient<scalar_t>(p, positive, c) : T(0);
  }
  __syncthreads();
  const int64_t image = positive.anchor / p.anchors;
  const auto width = static_cast<uint32_t>(positive.x1 - positive.x0);
  const uint32_t count = width * static_cast<uint32_t>(positive.y1 - positive.y0);
  T sum = 0, gradients[kMost] = {};
  for (uint64_t i = part * kThreads + threadIdx.x; i < count; i += parts * kThreads) {
    const int64_t y = positive.y0 + static_cast<uint32_t>(i) / width;
    const int64_t x = positive.x0 + static_cast<uint32_t>(i) % width;
    T pixel[kMost];
    load_pixel<kMost, scalar_t>(p, image, y, x, pixel);
    const T logit = dot(pixel, coefficients), wanted = T(v8_wanted_mask(p, positive, image, y, x));
    sum += v8_softplus(logit) - wanted * logit;
    const T gradient = sigmoid(logit) - wanted;
#pragma unroll
    for (int c = 0; c < kMost; ++c) gradients[c] += gradient * pixel[c];
  }
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int c = 0; c < kMost; c += kWarp) {
    if (c < p.channels) of_warps[warp][c + lane] = transposed_sum(gradients + c);
  }
  sum = sum_of_warps<kWarps>(warp_sum(sum));  // its barrier also covers of_warps
  T* out = static_cast<T*>(params.partials) + (which * all + part) * (1 + p.channels);
  if (threadIdx.x == 0) out[0] = sum;
  for (int c = threadIdx.x; c < p.channels; c += kThreads) {
    T gradient = 0;
    for (int i = 0; i < kWarps; ++i) gradient += of_warps[i][c];
    out[1 + c] = gradient;
  }
}

// Block 0 computes the loss; the others add up the parts of the gradients.
template <typename T>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ V8MaskLossParams params) {
  const V8MaskProblem& p = params.problem;
  const int64_t parts = v8_mask_parts(params.slots), count = params.first[p.levels * p.bs], row = 1 + p.channels;
  const auto* partials = static_cast<const T*>(params.partials);
  if (blockIdx.x > 0) {
    const int64_t i = static_cast<int64_t>(blockIdx.x - 1) * kFinishThreads + threadIdx.x;
    if (i >= count * p.channels) return;
    const T* at = partials + i / p.channels * parts * row + 1 + i % p.channels;
    const int64_t busy = v8_busy_parts(params.positives[i / p.channels], parts);
    T sum = 0;
    for (int64_t part = 0; part < busy; ++part) sum += at[part * row];
    static_cast<T*>(params.unit_gradients)[i] = sum;
    return;
  }
  double total[1] = {};
  for (int64_t i = threadIdx.x; i < count; i += kFinishThreads) {
    const int64_t busy = v8_busy_parts(params.positives[i], parts);
    double sum = 0;
    for (int64_t part = 0; part < busy; ++part) sum += static_cast<double>(partials[(i * parts + part) * row]);
    total[0] += sum * v8_mask_share<double>(p, params.positives[i]);
  }
  block_sum<kFinishThreads>(total);
  if (threadIdx.x == 0) v8_mask_finish<T>(params, total[0], count);
}

template <typename T>
__device__ T gradient_of(const V8MaskLossBackwardParams& params, const V8MaskPositive& positive) {
  return *static_cast<const T*>(params.grad_loss) * *static_cast<const T*>(params.scale) *
         v8_mask_share<T>(params.problem, positive);
}

// Each warp takes a positive. The first one of an anchor writes the gradient of all of them.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    coefficient_gradient_kernel(const __grid_constant__ V8MaskLossBackwardParams params) {
  using T = arithmetic_t<scalar_t>;
  const V8MaskProblem& p = params.problem;
  const int64_t which = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (which >= params.first[p.levels * p.bs]) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t anchor = params.positives[which].anchor;
  int64_t begin = which, end = which + 1;
  if (params.shared) {
    int64_t low = 0, high = p.levels * p.bs;  // the group is the last that begins at or before `which`
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (params.first[middle] <= which ? low : high) = middle;
    }
    begin = params.first[low];
    end = params.first[low + 1];
  }
  T sums[kV8MostMaskChannels / kWarp] = {};
  for (int64_t start = begin; start < end; start += kWarp) {
    const int64_t mine = start + lane;
    unsigned same = __ballot_sync(kFullWarp, mine < end && params.positives[mine].anchor == anchor);
    for (; same != 0; same &= same - 1) {
      const int64_t other = start + __ffs(static_cast<int>(same)) - 1;
      if (other < which) return;
      const T gradient = gradient_of<T>(params, params.positives[other]);
      const auto* unit = static_cast<const T*>(params.unit_gradients) + other * p.channels;
#pragma unroll
      for (int i = 0; i < kV8MostMaskChannels / kWarp; ++i) {
        if (lane + i * kWarp < p.channels) sums[i] += gradient * unit[lane + i * kWarp];
      }
    }
  }
  const V8Coefficients& out = params.coefficient_gradients;
  auto* at = static_cast<scalar_t*>(out.at) + anchor / p.anchors * out.stride_b + anchor % p.anchors * out.stride_a;
#pragma unroll
  for (int i = 0; i < kV8MostMaskChannels / kWarp; ++i) {
    const int c = lane + i * kWarp;
    if (c < p.channels) at[c * out.stride_c] = from_arithmetic<scalar_t>(sums[i]);
  }
}

// Each block takes a tile of an image.
template <int kMost, typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    proto_gradient_kernel(const __grid_constant__ V8MaskLossBackwardParams params) {
  using T = arithmetic_t<scalar_t>;
  __shared__ int32_t reaching[kThreads];
  __shared__ V8MaskPositive group[kGroup];
  __shared__ T coefficients[kGroup][kMost], gradients[kGroup];
  const V8MaskProblem& p = params.problem;
  const int64_t columns = ceil_div(p.width, kTileWidth), tiles = columns * ceil_div(p.height, kTileHeight);
  const int64_t image = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int64_t left = tile % columns * kTileWidth, top = tile / columns * kTileHeight;
  const int64_t x = left + threadIdx.x % kTileWidth, y = top + threadIdx.x / kTileWidth;
  const bool inside = x < p.width && y < p.height;
  T pixel[kMost], sums[kMost] = {};
  load_pixel<kMost, scalar_t>(p, image, inside ? y : 0, inside ? x : 0, pixel);
  for (int64_t which = image; which < p.levels * p.bs; which += p.bs) {
    for (int64_t begin = params.first[which]; begin < params.first[which + 1]; begin += kThreads) {
      bool take = false;
      if (begin + threadIdx.x < params.first[which + 1]) {
        const V8MaskPositive& one = params.positives[begin + threadIdx.x];
        take = one.x0 < left + kTileWidth && one.x1 > left && one.y0 < top + kTileHeight && one.y1 > top;
      }
      int64_t count = 0;
      const int64_t place = ordered_place(take, count);
      if (take) reaching[place] = threadIdx.x;
      __syncthreads();
      for (int first = 0; first < count; first += kGroup) {
        const int held = count - first < kGroup ? static_cast<int>(count - first) : kGroup;
        for (int i = threadIdx.x; i < held * kMost; i += kThreads) {
          const V8MaskPositive& one = params.positives[begin + reaching[first + i / kMost]];
          const int c = i % kMost;
          coefficients[i / kMost][c] = c < p.channels ? coefficient<scalar_t>(p, one, c) : T(0);
          if (c != 0) continue;
          group[i / kMost] = one;
          gradients[i / kMost] = gradient_of<T>(params, one);
        }
        __syncthreads();
        for (int k = 0; k < held; ++k) {
          const V8MaskPositive& one = group[k];
          if (x < one.x0 || x >= one.x1 || y < one.y0 || y >= one.y1) continue;
          const T wanted = T(v8_wanted_mask(p, one, image, y, x));
          const T gradient = (sigmoid(dot(pixel, coefficients[k])) - wanted) * gradients[k];
#pragma unroll
          for (int c = 0; c < kMost; ++c) sums[c] += gradient * coefficients[k][c];
        }
        __syncthreads();
      }
    }
  }
  if (!inside) return;
  const V8Prototypes& out = params.proto_gradients;
  auto* at = static_cast<scalar_t*>(out.at) + image * out.stride_b + y * out.stride_y + x * out.stride_x;
#pragma unroll
  for (int c = 0; c < kMost; ++c) {
    if (c < p.channels) at[c * out.stride_c] = from_arithmetic<scalar_t>(sums[c]);
  }
}

// Call f with a type whose `value` is the smallest size of arrays in registers that holds `channels`.
template <typename F>
cudaError_t with_most_channels(int channels, F&& f) {
  if (channels <= 32) return f(std::integral_constant<int, 32>());
  return f(std::integral_constant<int, kV8MostMaskChannels>());
}

}  // namespace

cudaError_t launch_v8_mask_loss(const V8MaskLossParams& params, cudaStream_t stream) {
  const V8MaskProblem& p = params.problem;
  list_kernel<<<static_cast<unsigned>(p.levels * p.bs), kThreads, 0, stream>>>(params);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return dispatch(p.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    const int64_t blocks = params.slots * v8_mask_parts(params.slots);
    if (blocks > 0) {
      const cudaError_t error = with_most_channels(p.channels, [&](auto most) {
        pixels_kernel<most.value, scalar_t><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
        return cudaGetLastError();
      });
      if (error != cudaSuccess) return error;
    }
    const int64_t gradients = ceil_div(params.slots * p.channels, kFinishThreads);
    finish_kernel<arithmetic_t<scalar_t>><<<static_cast<unsigned>(1 + gradients), kFinishThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t launch_v8_mask_loss_backward(const V8MaskLossBackwardParams& params, cudaStream_t stream) {
  const V8MaskProblem& p = params.problem;
  return dispatch(p.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    if (params.coefficient_gradients.at) {
      const auto bytes = static_cast<size_t>(p.bs * p.channels * p.anchors) * sizeof(scalar_t);
      cudaError_t error = cudaMemsetAsync(params.coefficient_gradients.at, 0, bytes, stream);
      if (error != cudaSuccess) return error;
      if (params.slots > 0) {
        const auto blocks = static_cast<unsigned>(ceil_div(params.slots, kWarps));
        coefficient_gradient_kernel<scalar_t><<<blocks, kThreads, 0, stream>>>(params);
        if (error = cudaGetLastError(); error != cudaSuccess) return error;
      }
    }
    if (!params.proto_gradients.at) return cudaSuccess;
    const int64_t tiles = ceil_div(p.width, kTileWidth) * ceil_div(p.height, kTileHeight);
    return with_most_channels(p.channels, [&](auto most) {
      proto_gradient_kernel<most.value, scalar_t><<<static_cast<unsigned>(p.bs * tiles), kThreads, 0, stream>>>(params);
      return cudaGetLastError();
    });
  });
}

}  // namespace torch_fastdet::core
