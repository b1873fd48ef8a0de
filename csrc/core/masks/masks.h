// Compute instance masks from prototypes and coefficients: logits, crop, bilinear resampling and threshold in one pass.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"

namespace torch_fastdet::core {

enum class MaskFormat : int32_t {
  kBytes,   // one byte a pixel, 0 or 1
  kFloats,  // one float a pixel, 0 or 1
  kBits,    // rows of ceil(width / 8) bytes; pixel x is bit x % 8 of byte x / 8
};

// Along an axis, prototypes are enlarged `factor` times, and a window is resampled to `size`, both bilinearly.
struct MaskAxis {
  int32_t size = 0;             // pixels of the mask
  int32_t in = 0;               // pixels of the prototypes
  int32_t factor = 1;           // 1, 2 or 4
  int32_t begin = 0, span = 0;  // window, in pixels of the enlarged prototypes
};

// Strides are in elements. Coefficients and boxes have dense rows.
struct MasksParams {
  const void* protos = nullptr;  // (images, channels, rows.in, columns.in)
  DType proto_type = DType::kFloat32;
  int64_t proto_stride[4] = {};
  const float* coefficients = nullptr;  // (images, count, channels)
  int64_t coefficient_stride[2] = {};
  const float* boxes = nullptr;  // (images, count, 4): x1, y1, x2, y2
  int64_t box_stride[2] = {};
  int64_t images = 0, count = 0, channels = 0;
  MaskAxis rows, columns;
  float scale_x = 1, scale_y = 1;  // applied to boxes before the crop
  bool sigmoid = false;            // sigmoid(logit) > 0.5 instead of logit > 0
  bool crop_first = false;         // crop the prototypes' pixels before resampling
  MaskFormat format = MaskFormat::kBytes;
  void* out = nullptr;  // (images, count, rows.size, columns.size, or bytes of a row)
};

// Launch one kernel (several only above 2^31 tiles).
cudaError_t launch_masks(const MasksParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
