// Squares of 2x2 pixels as channels, and back: what makes a strided convolution on few channels a dense one on more.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/common/storage.h"

namespace torch_fastdet::core {

// The image is (N, C, H, W), the deep tensor (N, deep_channels, H / 2 + border, W / 2 + border). Channel 4 c + 2 i + j
// of the deep pixel (h, w) is channel c of the image's pixel (2 (h - border) + i, 2 (w - border) + j). Channels from
// 4 C on, and the first row and column if border is 1, are zero.
struct SpaceToDepthParams {
  int64_t batch, channels, height, width;  // of the image
  int64_t deep_channels;
  int64_t border;           // 0 or 1
  int64_t image_stride[4];  // (n, c, h, w), in elements
  int64_t deep_stride[4];
  const void* source;
  void* target;
  DType source_dtype, target_dtype;
  bool bytes;  // the source is uint8, and 255 of it is 1: the image of space_to_depth alone

  TORCH_FASTDET_HOST_DEVICE int64_t deep_height() const { return height / 2 + border; }
  TORCH_FASTDET_HOST_DEVICE int64_t deep_width() const { return width / 2 + border; }
};

template <typename To, typename From>
TORCH_FASTDET_HOST_DEVICE To converted(From value) {
  return from_arithmetic<To>(static_cast<arithmetic_t<To>>(to_arithmetic(value)));
}

// A byte as a fraction of 255, in float32 and with the bits of torch's division: on a GPU it multiplies.
template <typename To>
TORCH_FASTDET_HOST_DEVICE To converted(uint8_t value) {
#ifdef __CUDA_ARCH__
  return converted<To>(static_cast<float>(value) * (1.f / 255.f));
#else
  return converted<To>(static_cast<float>(value) / 255.f);
#endif
}

template <typename From, typename To>
TORCH_FASTDET_HOST_DEVICE To deep_element(const SpaceToDepthParams& p, int64_t n, int64_t h, int64_t w, int64_t e) {
  const int64_t y = 2 * (h - p.border) + (e >> 1 & 1), x = 2 * (w - p.border) + (e & 1), c = e >> 2;
  if (c >= p.channels || h < p.border || w < p.border) return converted<To>(0.f);
  const int64_t at = n * p.image_stride[0] + c * p.image_stride[1] + y * p.image_stride[2] + x * p.image_stride[3];
  return converted<To>(static_cast<const From*>(p.source)[at]);
}

template <typename From, typename To>
TORCH_FASTDET_HOST_DEVICE To image_element(const SpaceToDepthParams& p, int64_t n, int64_t y, int64_t x, int64_t c) {
  const int64_t e = 4 * c + 2 * (y & 1) + (x & 1);
  const int64_t at = n * p.deep_stride[0] + e * p.deep_stride[1] + (y / 2 + p.border) * p.deep_stride[2] +
                     (x / 2 + p.border) * p.deep_stride[3];
  return converted<To>(static_cast<const From*>(p.source)[at]);
}

// From the image to a deep tensor that is dense in (N, H, W, C). At most 2^31 - 1 rows, and elements of a row.
cudaError_t launch_space_to_depth(const SpaceToDepthParams& params, cudaStream_t stream);

// And back: source is the deep tensor, of any strides.
cudaError_t launch_depth_to_space(const SpaceToDepthParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
