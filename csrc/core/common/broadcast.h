// Iterate over rows of broadcast tensors. The host plans; host and device compute each operand's offset for an index.
#pragma once

#include <cstdint>

#include "core/common/host_device.h"

namespace torch_fastdet::core {

constexpr int kMaxBroadcastDims = 8;

// `size[0]` varies fastest. Strides are in elements, and 0 for an operand that is broadcast along the dimension.
template <int kOperands>
struct BroadcastPlan {
  int dims = 0;
  int64_t numel = 1;
  int64_t size[kMaxBroadcastDims] = {};
  int64_t stride[kOperands][kMaxBroadcastDims] = {};

  // Append the next slower dimension, merging it into the last one if every operand permits. Return false if full.
  bool push(int64_t extent, const int64_t (&strides)[kOperands]) {
    numel *= extent;
    if (extent == 1) return true;
    if (dims > 0) {
      const int last = dims - 1;
      bool merges = true;
      for (int k = 0; k < kOperands; ++k) merges = merges && strides[k] == stride[k][last] * size[last];
      if (merges) {
        size[last] *= extent;
        return true;
      }
    }
    if (dims == kMaxBroadcastDims) return false;
    size[dims] = extent;
    for (int k = 0; k < kOperands; ++k) stride[k][dims] = strides[k];
    ++dims;
    return true;
  }
};

template <int kOperands>
TORCH_FASTDET_HOST_DEVICE void broadcast_offsets(const BroadcastPlan<kOperands>& plan, int64_t index,
                                                 int64_t (&offset)[kOperands]) {
  for (int k = 0; k < kOperands; ++k) offset[k] = 0;
  if (plan.dims == 0) return;
  for (int d = 0; d + 1 < plan.dims; ++d) {
    const int64_t extent = plan.size[d];
    // A 64-bit division costs a GPU some hundred instructions, a 32-bit one a tenth of that.
    const bool small = static_cast<uint64_t>(index | extent) <= UINT32_MAX;
    const int64_t quotient =
        small ? static_cast<int64_t>(static_cast<uint32_t>(index) / static_cast<uint32_t>(extent)) : index / extent;
    const int64_t position = index - quotient * extent;
    for (int k = 0; k < kOperands; ++k) offset[k] += position * plan.stride[k][d];
    index = quotient;
  }
  for (int k = 0; k < kOperands; ++k) offset[k] += index * plan.stride[k][plan.dims - 1];
}

}  // namespace torch_fastdet::core
