// Declare the parameters and launchers of resize, letterbox and the fused augmentation of batches of images. The
// arithmetic is in resize_math.h, warp_math.h and color_math.h; image_tables.h reads the tables.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/image/warp_math.h"

namespace torch_fastdet::core {

constexpr int kMaxStorages = 8;
constexpr int kMaxPlacements = 16;  // per layer
constexpr int kMaxCanvas = 32767;   // pixels a side
constexpr int kBorder = 114;        // grey level where no image lies

// The tables have these int64 columns.
constexpr int kPlacementColumns = 10;  // storage, offset, src_h, src_w, src_x, src_y, x, y, w, h
constexpr int kLayerColumns = 6;       // first placement, placements, canvas_h, canvas_w, warp, mask offset or -1
constexpr int kImageColumns = 4;       // layer, second layer or -1, flags, row of the tables or -1
constexpr int kResizeColumns = 8;      // storage, offset, src_h, src_w, out_offset, out_h, out_w, interpolation
constexpr int kLetterboxColumns = 10;  // storage, offset, src_h, src_w, pitch, new_h, new_w, top, left, interpolation
constexpr int kPieceColumns = 4;       // storage, offset, bytes, out_offset

enum ImageFlag : int { kFlipLeftRight = 1, kFlipUpDown = 2, kKeepBgr = 4 };

// Packed images are uint8, HWC, at byte offsets.
struct Storages {
  const uint8_t* data[kMaxStorages];
  int64_t size[kMaxStorages];
  int count;
};

enum class PixelType : int32_t { kUint8, kFloat16, kFloat32 };

// Describe a batch (B, C, H, W). Floats are x / 255, or with `reciprocal` x * (1 / 255) in float32, as on the GPU.
struct BatchOut {
  void* data;
  PixelType type;
  bool channels_last;
  bool reciprocal;
  int64_t batch;
  int channels, height, width;
};

struct AugmentParams {
  Storages storages;
  const int64_t* placements;
  const int64_t* layers;
  const double* matrices;  // 9 per layer: forward, row-major
  const int64_t* images;   // one row for each image of the batch
  const double* blend;     // one per image, or null
  const uint8_t* tables;   // 3 x 256 per row, or null
  const uint8_t* masks;    // may be null
  int64_t placement_rows, layer_rows, table_rows, mask_bytes;
  WarpArithmetic arithmetic;
  int hsv_lanes;  // pixels that OpenCV's vector code converts at once
  BatchOut out;
};

struct ResizeParams {
  Storages storages;
  const int64_t* plan;
  int64_t images;
  int channels;
  uint8_t* out;
  int64_t out_bytes;
};

struct LetterboxParams {
  Storages storages;
  const int64_t* plan;  // one row for each image of the batch
  bool keep_bgr;
  BatchOut out;
};

cudaError_t launch_image_augment(const AugmentParams& params, cudaStream_t stream);
cudaError_t launch_image_resize(const ResizeParams& params, cudaStream_t stream);
cudaError_t launch_image_letterbox(const LetterboxParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
