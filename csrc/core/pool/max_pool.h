// Compute max pooling of stride 1 and its gradient. A pooling can read one part of a concatenation and write the next.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/common/host_device.h"

namespace torch_fastdet::core {

constexpr int kMostPoolSide = 15;  // 15 * 15 places of a window fit in a byte

// Describe a tensor (N, C, H, W), or the channels of a larger one, by its strides of (n, c, h, w) in elements.
struct PoolTensor {
  void* data;
  int64_t stride[4];

  TORCH_FASTDET_HOST_DEVICE int64_t offset(int64_t n, int64_t c, int64_t h, int64_t w) const {
    return n * stride[0] + c * stride[1] + h * stride[2] + w * stride[3];
  }
};

// Forward, target is the largest value of source in the window around each pixel, indices (if not null) its place in
// the window, row by row, and copy (if not null) is source. The first of equal values and the last NaN count, as in
// PyTorch. Backward, source is the gradient of a pooling's result, and target that of its input: the sum of `copy` and
// of what the windows pass on, row by row in float (double for double).
struct MaxPoolParams {
  int64_t batch, channels, height, width;  // of the target
  int64_t source_height, source_width;
  // A pixel's window spans the rows and columns from `before` less to `after` more than the pixel's own.
  int before, after;
  bool channels_last;  // the order to walk in; forward and backward take any strides
  PoolTensor source, target, indices, copy;
  DType dtype;
};

template <typename A>
struct Largest {
  A value;
  int place;

  // Follow PyTorch's rule.
  TORCH_FASTDET_HOST_DEVICE void consider(A candidate, int at) {
    if (candidate > value || candidate != candidate) {
      value = candidate;
      place = at;
    }
  }
};

// Compute the rows or columns of the window at `at` that are inside the map: [first, last].
struct PoolSpan {
  int first, last;

  TORCH_FASTDET_HOST_DEVICE PoolSpan(int64_t at, int64_t size, int before, int after)
      : first(at < before ? static_cast<int>(-at) : -before),
        last(size - 1 - at < after ? static_cast<int>(size - 1 - at) : after) {}
};

// Launch one kernel each. Rows (channels_last: of pixels, else planes) and elements of a row are at most 2^31 - 1.
cudaError_t launch_max_pool_forward(const MaxPoolParams& params, cudaStream_t stream);
cudaError_t launch_max_pool_backward(const MaxPoolParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
