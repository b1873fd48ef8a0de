// Parse rows of the plan tables. Rows that point outside or are invalid read as nothing; the CPU raises before that.
#pragma once

#include <cstdint>

#include "core/common/host_device.h"
#include "core/image/image.h"
#include "core/image/resize_math.h"

namespace torch_fastdet::core {

constexpr int64_t kMaxSide = int64_t{1} << 24;

// Return an image's bytes, or null. `pitch` is the number of bytes between rows.
TORCH_FASTDET_HOST_DEVICE const uint8_t* image_bytes(const Storages& storages, int64_t storage, int64_t offset,
                                                     int64_t height, int64_t row_bytes, int64_t pitch) {
  if (storage < 0 || storage >= storages.count || offset < 0 || height <= 0 || row_bytes <= 0 || pitch < row_bytes) {
    return nullptr;
  }
  const int64_t size = storages.size[storage];
  if (height > kMaxSide || pitch > 4 * kMaxSide) return nullptr;
  return offset <= size && (height - 1) * pitch + row_bytes <= size - offset ? storages.data[storage] + offset
                                                                             : nullptr;
}

// An image covers [x0, x1) x [y0, y1) of a canvas with pixels data[origin + y * pitch + x * channels].
struct Patch {
  const uint8_t* data;
  int64_t origin;
  int64_t pitch;
  int x0, y0, x1, y1;
  bool tight;  // eight bytes from the image's last pixel would exceed its storage
  TORCH_FASTDET_HOST_DEVICE bool holds(int x, int y) const { return x >= x0 && x < x1 && y >= y0 && y < y1; }
  TORCH_FASTDET_HOST_DEVICE bool holds_square(int x, int y) const {
    return x >= x0 && x + 1 < x1 && y >= y0 && y + 1 < y1;
  }
  TORCH_FASTDET_HOST_DEVICE const uint8_t* at(int x, int y, int channels) const {
    return data + (origin + y * pitch + static_cast<int64_t>(x) * channels);
  }
};

TORCH_FASTDET_HOST_DEVICE int64_t greater(int64_t a, int64_t b) {
  return a > b ? a : b;
}
TORCH_FASTDET_HOST_DEVICE int64_t lesser(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// The patch is empty (x0 == x1) if the row covers nothing.
TORCH_FASTDET_HOST_DEVICE Patch read_patch(const Storages& storages, const int64_t* row, int channels, int canvas_h,
                                           int canvas_w) {
  Patch patch{};
  const int64_t src_h = row[2], src_w = row[3], src_x = row[4], src_y = row[5], x = row[6], y = row[7];
  if (src_w <= 0 || src_w > kMaxSide) return patch;
  for (int i = 4; i < kPlacementColumns; ++i) {
    if (row[i] < -kMaxSide || row[i] > kMaxSide) return patch;
  }
  const int64_t pitch = src_w * channels;
  patch.data = image_bytes(storages, row[0], row[1], src_h, pitch, pitch);
  const int64_t x0 = greater(greater(x, 0), x - src_x), y0 = greater(greater(y, 0), y - src_y);
  const int64_t x1 = lesser(lesser(x + row[8], canvas_w), x - src_x + src_w);
  const int64_t y1 = lesser(lesser(y + row[9], canvas_h), y - src_y + src_h);
  if (!patch.data || x0 >= x1 || y0 >= y1) return patch;
  patch.tight = row[1] + src_h * pitch + 8 > storages.size[row[0]];
  patch.pitch = pitch;
  patch.origin = (src_y - y) * pitch + (src_x - x) * channels;
  patch.x0 = static_cast<int>(x0);
  patch.y0 = static_cast<int>(y0);
  patch.x1 = static_cast<int>(x1);
  patch.y1 = static_cast<int>(y1);
  return patch;
}

// Describe a canvas, how it is warped, and its patches. Later patches lie above earlier ones.
struct Layer {
  int count;
  int canvas_h, canvas_w;
  WarpKind warp;
  const uint8_t* mask;  // canvas_h * canvas_w: nonzero where the canvas shows its mirror image; or null
  InverseMap map;
  Patch patch[kMaxPlacements];
};

// Read everything except the patches and the map. A layer that does not exist has no patches and shows only the border.
TORCH_FASTDET_HOST_DEVICE void read_layer_head(const AugmentParams& p, int64_t index, Layer& layer) {
  layer.count = 0;
  layer.canvas_h = layer.canvas_w = 0;
  layer.warp = WarpKind::kNone;
  layer.mask = nullptr;
  if (index < 0 || index >= p.layer_rows) return;
  const int64_t* row = p.layers + index * kLayerColumns;
  const int64_t count = row[1], h = row[2], w = row[3];
  if (h < 0 || h > kMaxCanvas || w < 0 || w > kMaxCanvas) return;
  layer.canvas_h = static_cast<int>(h);
  layer.canvas_w = static_cast<int>(w);
  if (row[4] == 1 || row[4] == 2) layer.warp = static_cast<WarpKind>(row[4]);
  if (p.masks && row[5] >= 0 && row[5] <= p.mask_bytes && h * w <= p.mask_bytes - row[5]) layer.mask = p.masks + row[5];
  if (row[0] >= 0 && count > 0 && count <= kMaxPlacements && row[0] <= p.placement_rows - count) {
    layer.count = static_cast<int>(count);
  }
}

TORCH_FASTDET_HOST_DEVICE Patch read_layer_patch(const AugmentParams& p, int64_t index, const Layer& layer, int i) {
  const int64_t row = p.layers[index * kLayerColumns] + i;
  return read_patch(p.storages, p.placements + row * kPlacementColumns, p.out.channels, layer.canvas_h, layer.canvas_w);
}

TORCH_FASTDET_HOST_DEVICE InverseMap read_layer_map(const AugmentParams& p, int64_t index, const Layer& layer) {
  const double* m = p.matrices + index * 9;
  return layer.warp == WarpKind::kAffine        ? invert_affine(m)
         : layer.warp == WarpKind::kPerspective ? invert_perspective(m)
                                                : InverseMap{};
}

// Return the pixel of the canvas at (x, y), or null for the border.
TORCH_FASTDET_HOST_DEVICE const uint8_t* canvas_pixel(const Layer& layer, int x, int y, int channels) {
  if (x < 0 || y < 0 || x >= layer.canvas_w || y >= layer.canvas_h) return nullptr;
  if (layer.mask && layer.mask[static_cast<int64_t>(y) * layer.canvas_w + x]) x = layer.canvas_w - 1 - x;
  for (int i = layer.count - 1; i >= 0; --i) {
    if (layer.patch[i].holds(x, y)) return layer.patch[i].at(x, y, channels);
  }
  return nullptr;
}

// Return the only patch in the square from (x, y) to (x + 1, y + 1), -1 for none, -2 if each pixel must be looked up.
TORCH_FASTDET_HOST_DEVICE int patch_of_square(const Layer& layer, int x, int y) {
  if (layer.mask) return -2;
  for (int i = layer.count - 1; i >= 0; --i) {
    const Patch& patch = layer.patch[i];
    if (patch.holds_square(x, y)) return i;
    if (x + 1 >= patch.x0 && x < patch.x1 && y + 1 >= patch.y0 && y < patch.y1) return -2;
  }
  return -1;
}

struct ResizeJob {
  const uint8_t* source;  // null: nothing to do
  uint8_t* out;
  int64_t pitch;
  Resize resize;
};

TORCH_FASTDET_HOST_DEVICE bool is_side(int64_t pixels) {
  return pixels > 0 && pixels <= kMaxSide;
}

TORCH_FASTDET_HOST_DEVICE ResizeJob read_resize_job(const ResizeParams& p, int64_t index) {
  const int64_t* row = p.plan + index * kResizeColumns;
  ResizeJob job{};
  if (!is_side(row[2]) || !is_side(row[3]) || !is_side(row[5]) || !is_side(row[6]) || row[4] < 0) return job;
  const int64_t row_bytes = row[6] * p.channels;
  if (row[4] > p.out_bytes || row[5] > (p.out_bytes - row[4]) / row_bytes) return job;
  job.pitch = row[3] * p.channels;
  job.source = image_bytes(p.storages, row[0], row[1], row[2], job.pitch, job.pitch);
  job.out = p.out + row[4];
  job.resize = make_resize(static_cast<int>(row[3]), static_cast<int>(row[2]), static_cast<int>(row[6]),
                           static_cast<int>(row[5]), row[7] == 1 ? Interpolation::kArea : Interpolation::kLinear);
  return job;
}

// Describe an image of a letterboxed batch. Its pixels fill columns [left, left + resize.x.target), and rows likewise.
struct LetterboxJob {
  const uint8_t* source;  // null: only the border
  int64_t pitch;
  int left, top;
  Resize resize;
  TORCH_FASTDET_HOST_DEVICE bool holds(int x, int y) const {
    return source && x >= left && y >= top && x - left < resize.x.target && y - top < resize.y.target;
  }
};

TORCH_FASTDET_HOST_DEVICE LetterboxJob read_letterbox_job(const LetterboxParams& p, int64_t index) {
  const int64_t* row = p.plan + index * kLetterboxColumns;
  LetterboxJob job{};
  if (!is_side(row[2]) || !is_side(row[3]) || !is_side(row[5]) || !is_side(row[6])) return job;
  if (row[7] < -kMaxSide || row[7] > kMaxSide || row[8] < -kMaxSide || row[8] > kMaxSide) return job;
  job.pitch = row[4];
  job.source = image_bytes(p.storages, row[0], row[1], row[2], row[3] * p.out.channels, job.pitch);
  job.top = static_cast<int>(row[7]);
  job.left = static_cast<int>(row[8]);
  job.resize = make_resize(static_cast<int>(row[3]), static_cast<int>(row[2]), static_cast<int>(row[6]),
                           static_cast<int>(row[5]), row[9] == 1 ? Interpolation::kArea : Interpolation::kLinear);
  return job;
}

// Return the value of a level in a floating-point batch.
TORCH_FASTDET_HOST_DEVICE float normalised(int level, bool reciprocal) {
  const float x = static_cast<float>(level);
  return reciprocal ? mul_rn(x, 1.f / 255.f) : div_rn(x, 255.f);
}

// Return the index of the element of channel c of pixel (x, y) of image n.
TORCH_FASTDET_HOST_DEVICE int64_t batch_index(const BatchOut& out, int64_t n, int c, int y, int x) {
  const int64_t pixel = static_cast<int64_t>(y) * out.width + x, pixels = static_cast<int64_t>(out.height) * out.width;
  return out.channels_last ? (n * pixels + pixel) * out.channels + c : (n * out.channels + c) * pixels + pixel;
}

}  // namespace torch_fastdet::core
