// Max pooling of stride 1, also from one part of a concatenation into the next, and its gradient.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/common/host_device.h"

namespace torch_fastdet::core {

constexpr int kMostPoolSide = 15;  // 15 * 15 places of a window fit in a byte

// One tensor (N, C, H, W), or the channels of a larger one that it stands in: strides of (n, c, h, w) in elements.
struct PoolTensor {
  void* data;
  int64_t stride[4];

  TORCH_FASTDET_HOST_DEVICE int64_t offset(int64_t n, int64_t c, int64_t h, int64_t w) const {
    return n * stride[0] + c * stride[1] + h * stride[2] + w * stride[3];
  }
};

// Forward: target = the largest value of source in the window around each pixel, indices = its place in the window, row
// by row, if not null; copy = source, if not null. Of equal values the first counts, of NaNs the last, as in PyTorch.
// Backward: source = the gradient of a pooling's result, target = that of what was pooled: `copy` and what the windows
// pass on, summed row by row in float (double for double).
struct MaxPoolParams {
  int64_t batch, channels, height, width;  // of the target
  int64_t source_height, source_width;
  // Rows and columns of the source for a pixel of the target: from `before` less to `after` more than its own.
  int before, after;
  bool channels_last;  // which way to walk; forward and backward take any strides
  PoolTensor source, target, indices, copy;
  DType dtype;
};

template <typename A>
struct Largest {
  A value;
  int place;

  // PyTorch's rule.
  TORCH_FASTDET_HOST_DEVICE void consider(A candidate, int at) {
    if (candidate > value || candidate != candidate) {
      value = candidate;
      place = at;
    }
  }
};

// Rows or columns of the window of `at` that are inside of the map: [first, last].
struct PoolSpan {
  int first, last;

  TORCH_FASTDET_HOST_DEVICE PoolSpan(int64_t at, int64_t size, int before, int after)
      : first(at < before ? static_cast<int>(-at) : -before),
        last(size - 1 - at < after ? static_cast<int>(size - 1 - at) : after) {}
};

// One launch each. At most 2^31 - 1 rows (channels_last: of pixels, else planes), and elements of a row.
cudaError_t launch_max_pool_forward(const MaxPoolParams& params, cudaStream_t stream);
cudaError_t launch_max_pool_backward(const MaxPoolParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
