// A stem's convolution on its images' squares (core/space_to_depth) has 16 channels and is 3x3 padded or 2x2.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/common/storage.h"

namespace torch_fastdet::core {

constexpr int kStemChannels = 16;

// Tensors are dense, with the channels innermost: squares (batch, square_height, square_width, 16), out (batch, height,
// width, outputs), weight (outputs, side, side, 16). All share one type; float32 sums are rounded to it once.
struct StemConvSizes {
  int64_t batch, height, width, outputs;
  int64_t side;  // of the convolution kernel: 2 or 3

  TORCH_FASTDET_HOST_DEVICE int64_t border() const { return side == 3; }
  TORCH_FASTDET_HOST_DEVICE int64_t square_height() const { return height + (side == 2); }
  TORCH_FASTDET_HOST_DEVICE int64_t square_width() const { return width + (side == 2); }
  TORCH_FASTDET_HOST_DEVICE int64_t weights() const { return outputs * side * side * kStemChannels; }
};

inline bool stem_conv_has(int64_t outputs) {
  return outputs >= 16 && outputs <= 96 && outputs % 16 == 0;
}

// Return whether the GPU's kernels can index these: at most 2^31 - 1 pixels, and elements of an image.
inline bool stem_conv_fits(const StemConvSizes& sizes) {
  constexpr int64_t kMost = 0x7fffffff;
  const int64_t pixels = sizes.square_height() * sizes.square_width();
  return pixels <= kMost / sizes.outputs && sizes.batch <= kMost / pixels;
}

struct StemConvForwardParams {
  StemConvSizes sizes;
  const void* squares;
  const void* weight;
  void* out;
  DType dtype;
};

struct StemConvBackwardParams {
  StemConvSizes sizes;
  const void* grad_out;
  const void* squares;
  void* grad_weight;
  float* parts;    // blocks * sizes.weights(), for the GPU
  int64_t blocks;  // from stem_conv_blocks
  DType dtype;
};

// Set the number of blocks that share the weights' gradient on the current device; the order of its sums depends on it.
cudaError_t stem_conv_blocks(const StemConvSizes& sizes, int64_t& blocks);

// Tensors are float16 or bfloat16, on compute capability 8.0 or newer. Pointers are aligned to 16 bytes.
cudaError_t launch_stem_conv_forward(const StemConvForwardParams& params, cudaStream_t stream);
cudaError_t launch_stem_conv_backward(const StemConvBackwardParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
