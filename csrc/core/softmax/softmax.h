// The gradient of a softmax along the last dimension, whose own gradient comes in any layout, such as transposed.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"

namespace torch_fastdet::core {

constexpr int kMostSoftmaxColumns = 1024;

// y is softmax's (batch, rows, columns), dense, of `dtype`'s arithmetic type. out = y grad - y sum(y grad) by rows.
struct SoftmaxBackwardParams {
  int64_t batch, rows, columns;
  int64_t batch_stride, row_stride, column_stride;  // of grad, in elements
  const void *grad, *y;
  void* out;
  DType dtype;  // of grad and out
};

// At most kMostSoftmaxColumns columns.
cudaError_t launch_softmax_backward(const SoftmaxBackwardParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
