// Plan the tiles that a mask is computed in on the GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/common/host_device.h"
#include "core/masks/masks_math.h"

namespace torch_fastdet::core {

constexpr int kTileWidth = 128, kTileHeight = 32;  // largest size of a tile
constexpr int kLowPixels = 512;                    // prototype pixels of a tile, at most
constexpr int kLowWidth = 160, kLowHeight = 128;   // the same along each axis
constexpr int kMaskGroup = 256;                    // masks that the blocks of a tile share, at most
constexpr int kMaskBatch = 8;                      // masks per block

// Sides are powers of two. A tile uses adjacent prototype pixels where it enlarges them, otherwise `taps` per pixel.
struct MaskTile {
  int taps;
  int width, height;
  bool dense_columns, dense_rows;
  int64_t columns, rows;  // tiles per mask
  int64_t groups;         // groups of masks per image
  int group;              // masks per group, at most
  int jobs;               // blocks per tile and group
};

// Return at most how many prototype pixels are neighbours of `pixels` pixels of the mask.
inline int low_pixels(const MaskAxis& axis, int taps, int pixels, bool dense) {
  if (!dense) return taps * pixels;
  if (pixels == 1) return taps;
  const double scale = static_cast<double>(axis.span) / axis.size / axis.factor;
  // 0.5 covers the rounding of positions.
  return taps == 1 ? pixels : static_cast<int>((pixels - 1) * scale + 0.5) + 1 + taps;
}

inline bool is_enlarged(const MaskAxis& axis) {
  return axis.span <= static_cast<int64_t>(axis.size) * axis.factor;
}

inline MaskTile plan_mask_tiles(const MasksParams& p) {
  MaskTile tile{};
  tile.taps = std::max(tap_count(p.rows), tap_count(p.columns));
  tile.dense_columns = is_enlarged(p.columns), tile.dense_rows = is_enlarged(p.rows);
  tile.width = tile.dense_columns ? kTileWidth : kTileWidth / 4;
  tile.height = kTileHeight;
  const int width = low_pixels(p.columns, tile.taps, tile.width, tile.dense_columns);
  for (; tile.height > 1; tile.height /= 2) {
    const int height = low_pixels(p.rows, tile.taps, tile.height, tile.dense_rows);
    if (height <= kLowHeight && width * height <= kLowPixels) break;
  }
  tile.columns = ceil_div(p.columns.size, tile.width), tile.rows = ceil_div(p.rows.size, tile.height);
  tile.groups = ceil_div(p.count, kMaskGroup);
  tile.group = tile.groups ? static_cast<int>(ceil_div(p.count, tile.groups)) : 0;
  // The masks whose box intersects the tile and the other masks may each leave one block partly filled.
  tile.jobs = static_cast<int>(ceil_div(tile.group, kMaskBatch)) + 1;
  return tile;
}

}  // namespace torch_fastdet::core
