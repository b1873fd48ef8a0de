// Compute multi-scale deformable attention: each query adds bilinear samples of points of each level, with weights.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"

namespace torch_fastdet::core {

constexpr int kMostDeformableLevels = 16;
// Kernels count the elements of one image of each tensor in 32 bits.
constexpr int64_t kMostDeformableElements = (int64_t{1} << 31) - 1;

struct DeformableLevel {
  int32_t height, width;
  int32_t first;  // first pixel of the level in the value
};

// Tensors are dense and aligned to 16 bytes. A is the arithmetic type of `dtype`.
struct DeformableAttentionParams {
  int64_t batch;
  int32_t pixels, queries, heads, channels, points;
  int32_t level_count;
  DeformableLevel levels[kMostDeformableLevels];
  DType dtype;
  const void* value;      // (batch, pixels, heads, channels)
  const void* locations;  // (batch, queries, heads, levels, points, 2) A: x, y relative to the level's sides
  const void* weights;    // (batch, queries, heads, levels, points) A
  void* out;              // (batch, queries, heads, channels)
};

// The backward pass does not use `forward.out`.
struct DeformableAttentionBackwardParams {
  DeformableAttentionParams forward;
  const void* grad;      // gradient of out, in its dtype
  void* grad_value;      // in the value's dtype
  void* grad_locations;  // A
  void* grad_weights;    // A
  void* bounds;          // (batch, heads, queries) A, scratch memory of the GPU
};

cudaError_t launch_deformable_attention(const DeformableAttentionParams& params, cudaStream_t stream);
cudaError_t launch_deformable_attention_backward(const DeformableAttentionBackwardParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
