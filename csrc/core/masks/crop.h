// Crop masks to their boxes in one pass, which reads and writes each pixel once.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/common/storage.h"
#include "core/masks/masks_math.h"

namespace torch_fastdet::core {

struct CropParams {
  const void* masks = nullptr;  // (count, height, width), dense
  void* out = nullptr;          // the same; may be `masks` itself
  int integer_bytes = 0;        // bytes of an integer or bool pixel: 1, 2, 4 or 8; 0: pixels are of `dtype`
  DType dtype = DType::kFloat32;
  const float* boxes = nullptr;  // (count, 4): x1, y1, x2, y2, dense rows
  int64_t box_stride = 0;
  int64_t count = 0;
  int32_t height = 0, width = 0;
};

// Return the columns that the mask's box keeps in a row, where rows are counted over all masks.
TORCH_FASTDET_HOST_DEVICE PixelRange columns_kept(const CropParams& p, int64_t row) {
  const int64_t mask = row / p.height;
  const int32_t y = static_cast<int32_t>(row - mask * p.height);
  const float* box = p.boxes + mask * p.box_stride;
  const PixelRange rows = pixels_between(box[1], box[3], p.height);
  return y >= rows.low && y < rows.high ? pixels_between(box[0], box[2], p.width) : PixelRange{0, 0};
}

// Multiply, as the original function does: NaN and infinity outside of a box give NaN, and zeros keep their sign.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T cropped(T value, bool kept) {
  return kept ? value : from_arithmetic<T>(to_arithmetic(value) * 0);
}

// Call f with a zero of the unsigned integer of `bytes` bytes. A crop copies integers or sets them to zero.
template <typename F>
void with_integer(int bytes, F&& f) {
  switch (bytes) {
    case 1:
      return f(uint8_t{});
    case 2:
      return f(uint16_t{});
    case 4:
      return f(uint32_t{});
  }
  f(uint64_t{});
}

template <typename T>
void crop_rows(const CropParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const PixelRange kept = columns_kept(p, row);
    const T* in = static_cast<const T*>(p.masks) + row * p.width;
    T* out = static_cast<T*>(p.out) + row * p.width;
    for (int32_t x = 0; x < kept.low; ++x) out[x] = cropped(in[x], false);
    if (out != in) {
      for (int32_t x = kept.low; x < kept.high; ++x) out[x] = in[x];
    }
    for (int32_t x = kept.high; x < p.width; ++x) out[x] = cropped(in[x], false);
  }
}

cudaError_t launch_crop(const CropParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
