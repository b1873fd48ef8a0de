// Sum (or copy) slices along the channels, and compute what a biased convolution or linear layer needs of its gradient.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/common/storage.h"

namespace torch_fastdet::core {

constexpr int kMostSlices = 4;

// A slice is `rows` rows of `width` contiguous elements: the channels of a pixel in channels_last, those of an image in
// NCHW. A pitch is the number of elements from one row to the next. No result may overlap with an operand.
struct SumSlicesParams {
  int64_t rows, width;
  int count;  // number of operands, 1 to kMostSlices
  const void* x[kMostSlices];
  int64_t x_pitch[kMostSlices];
  void* out;
  int64_t out_pitch;
  DType dtype;
};

// Add in the arithmetic type and round to T, as the addition of two tensors does.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T rounded_sum(T a, T b) {
  return from_arithmetic<T>(to_arithmetic(a) + to_arithmetic(b));
}

constexpr int kPadTile = 64;  // channels, and positions, that a block moves at once
constexpr int kMostPadSplits = 512;

// `x` is (batch, channels, pixels) of any strides, `out` is dense (batch, pixels, padded) with zeros in the added
// channels, and `sums` holds the sum of each channel. Block i of `splits` adds tiles i, i + splits, ... of positions.
struct PadAndSumParams {
  int64_t batch, channels, pixels, padded;
  int64_t image_stride, channel_stride, pixel_stride;  // of x, in elements
  const void* x;
  void *out, *sums;
  void* partials;  // splits * padded elements of the arithmetic type
  DType dtype;

  TORCH_FASTDET_HOST_DEVICE int64_t positions() const { return batch * pixels; }
  TORCH_FASTDET_HOST_DEVICE int splits() const {
    const int64_t tiles = (positions() + kPadTile - 1) / kPadTile;
    return static_cast<int>(tiles < kMostPadSplits ? tiles : kMostPadSplits);
  }
};

constexpr int kMostSumSplits = 512;
constexpr int kSumRows = 64;  // minimum number of rows of a split

// `x` is dense, `rows` rows of `width` elements; `sums` holds the sum of each column. A block covers b rows at a time:
// block i of `splits` adds up rows i * b to i * b + b - 1, then (i + splits) * b and so on.
struct SumRowsParams {
  int64_t rows, width;
  const void* x;
  void* sums;
  void* partials;  // splits * width elements of the arithmetic type
  DType dtype;

  TORCH_FASTDET_HOST_DEVICE int splits() const {
    const int64_t wanted = (rows + kSumRows - 1) / kSumRows;
    return static_cast<int>(wanted < kMostSumSplits ? wanted : kMostSumSplits);
  }
};

cudaError_t launch_sum_slices(const SumSlicesParams& params, cudaStream_t stream);
cudaError_t launch_pad_and_sum(const PadAndSumParams& params, cudaStream_t stream);
cudaError_t launch_sum_rows(const SumRowsParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
