// Scale boxes of a letterboxed network input back to the pixels of the original images.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"

namespace torch_fastdet::core {

// Strides are in elements, and the output is contiguous. Columns after the box are copied.
struct ScaleBoxesParams {
  const void* boxes = nullptr;        // (images, boxes, columns)
  const void* letterboxes = nullptr;  // (images, 6) contiguous, float (double for double): Letterbox<A>
  void* output = nullptr;
  int64_t images = 0, count = 0, columns = 0;
  int64_t image_stride = 0, box_stride = 0, column_stride = 0;
  bool center_size = false;  // boxes are center and size: only move the center, and clip nothing
  DType dtype = DType::kFloat32;
};

cudaError_t launch_scale_boxes(const ScaleBoxesParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
