// The kernels of the v8 losses share these block sizes and a warp's walk over a tensor.
#pragma once

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/v8_loss/v8_loss.h"

namespace torch_fastdet::core {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChunk = 2048;  // elements of a dense tensor that a warp takes at a time
constexpr int kSides = 4;
constexpr int kTermThreads = 128;
constexpr int kTermSlots = kTermThreads / kSides;
constexpr int kTerms = 4;  // sums over slots: scores, box, class, distance

__device__ inline uint64_t warp_max(uint64_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kFullWarp, value, step);
    value = other > value ? other : value;
  }
  return value;
}

__device__ inline void raise_to(uint64_t* place, double value) {
  atomicMax(reinterpret_cast<unsigned long long*>(place), static_cast<unsigned long long>(v8_order(value)));
}

// Count the pieces of a tensor that warps take: of its class planes, of all its planes, or of its rows.
__host__ __device__ inline int64_t plane_pieces(const V8Tensor& tensor) {
  return ceil_div(tensor.anchors, kChunk);
}

__host__ __device__ inline int64_t row_pieces(const V8Tensor& tensor, int64_t bs) {
  return ceil_div(bs * tensor.anchors * tensor.channels, kChunk);
}

__host__ __device__ inline int64_t class_pieces(const V8Tensor& tensor, int64_t bs) {
  if (tensor.channels == tensor.box_channels) return 0;
  return tensor.layout == V8Layout::kPlanes ? bs * (tensor.channels - tensor.box_channels) * plane_pieces(tensor)
                                            : row_pieces(tensor, bs);
}

__host__ __device__ inline int64_t gradient_pieces(const V8Tensor& tensor, int64_t bs) {
  return tensor.layout == V8Layout::kPlanes ? bs * tensor.channels * plane_pieces(tensor) : row_pieces(tensor, bs);
}

// Return whether vectors of `size` elements can cover a tensor without spanning planes, or boxes and classes.
__device__ inline bool in_vectors(const V8Tensor& tensor, int size) {
  if (!tensor.dense || !is_vector_aligned(tensor.logits) || !is_vector_aligned(tensor.gradient)) return false;
  return tensor.layout == V8Layout::kPlanes ? tensor.anchors % size == 0
                                            : tensor.channels % size == 0 && tensor.box_channels % size == 0;
}

// Call vector(e, channel) or element(e, channel) for a warp's vectors or single elements, with e in tensor order.
template <int kSize, typename OnVector, typename OnElement>
__device__ void visit_piece(const V8Tensor& tensor, int64_t piece, int first_channel, int64_t total, OnVector vector,
                            OnElement element) {
  const int lane = threadIdx.x % kWarp;
  const bool vectors = in_vectors(tensor, kSize);
  if (tensor.layout == V8Layout::kPlanes) {
    const int channels = tensor.channels - first_channel;
    const int64_t plane = piece / plane_pieces(tensor);
    const auto channel = static_cast<int>(plane % channels) + first_channel;
    const int64_t base = (plane / channels * tensor.channels + channel) * tensor.anchors;
    const int64_t begin = piece % plane_pieces(tensor) * kChunk;
    const int64_t end = begin + kChunk < tensor.anchors ? begin + kChunk : tensor.anchors;
    if (vectors) {
#pragma unroll 4
      for (int64_t i = begin + lane * kSize; i < end; i += kWarp * kSize) vector(base + i, channel);
    } else {
      for (int64_t i = begin + lane; i < end; i += kWarp) element(base + i, channel);
    }
    return;
  }
  const int64_t begin = piece * kChunk, end = begin + kChunk < total ? begin + kChunk : total;
  if (vectors) {
#pragma unroll 4
    for (int64_t i = begin + lane * kSize; i < end; i += kWarp * kSize) {
      vector(i, static_cast<int>(i % tensor.channels));
    }
  } else {
    for (int64_t i = begin + lane; i < end; i += kWarp) element(i, static_cast<int>(i % tensor.channels));
  }
}

// Return the position of the logit for element e of the gradient's layout.
__device__ inline int64_t logit_of_element(const V8Tensor& tensor, int64_t e, int channel) {
  if (tensor.dense) return e;
  const int64_t planes = static_cast<int64_t>(tensor.channels) * tensor.anchors;
  const int64_t anchor = tensor.layout == V8Layout::kPlanes ? e % tensor.anchors : e / tensor.channels % tensor.anchors;
  return v8_logit(tensor, e / planes, anchor) + channel * tensor.stride_c;
}

// Exchange a box's sides between the four threads of a slot that hold them. All lanes of the warp must call this.
template <typename T>
__device__ void exchange_sides(T mine, T (&all)[kSides]) {
  const int first = threadIdx.x % kWarp / kSides * kSides;
#pragma unroll
  for (int side = 0; side < kSides; ++side) all[side] = __shfl_sync(kFullWarp, mine, first + side);
}

}  // namespace torch_fastdet::core
