// Upsample 2x by nearest neighbour, forward (optionally copying a second tensor beside the result) and backward.
#pragma once

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/upsample/upsample_plan.h"

namespace torch_fastdet::core {

struct UpsampleForwardParams {
  UpsamplePlan plan;  // small = x, large = the part of out that x fills
  const void* x;
  void* out;
  CopyPlan copy;  // copies skip into its part of the same buffer; numel() == 0 if nothing is concatenated
  const void* skip;
  void* skip_out;
  int itemsize;  // bytes of an element, 2, 4 or 8; values are moved, never computed with
};

// Each gradient is the sum of a 2x2 square, added left to right and top to bottom in float (double for double).
struct UpsampleBackwardParams {
  UpsamplePlan plan;  // small = grad_x, large = grad_out
  const void* grad_out;
  void* grad_x;
  DType dtype;
};

// Launch one kernel (several only above 2^29 accesses). Tensors must not overlap.
cudaError_t launch_upsample_forward(const UpsampleForwardParams& params, cudaStream_t stream);

cudaError_t launch_upsample_backward(const UpsampleBackwardParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
