// Plan on the host, from the headers of the packed JPEGs, where the CUDA kernels keep each image's data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/jpeg/jpeg_math.h"

namespace torch_fastdet::core {

// Hold the state of an image. jpeg_prepare writes it to the workspace, and the other kernels copy it to shared memory.
struct alignas(16) JpegState {
  JpegHeader header;
  JpegRegion region;
  JpegTurn turn;
  JpegPlane planes[3];
  const uint8_t* packed;
  uint8_t* out;           // address of stored pixel (0, 0)
  int16_t* coefficients;  // address of the image's first slot
  int64_t first_group, first_tile;
  int tile_columns;
  // Each block of an MCU has a component and a position in it.
  uint8_t component[kJpegMaxBlocks], column[kJpegMaxBlocks], row[kJpegMaxBlocks];
  // Only jpeg_transform copies this last part. The rows begin in different banks of shared memory.
  alignas(16) uint16_t quantizers[3][kJpegBlock + 8];
};
constexpr int kJpegStateShort = offsetof(JpegState, quantizers);

// Describe a segment to decode, which is the work of one thread of jpeg_entropy.
struct alignas(16) JpegSlot {
  uint32_t segment;
  uint32_t seen;  // bit m: MCU m is needed; 0: nothing to do
  uint16_t x, y;  // coordinates of its first MCU
  uint32_t unused;
};

// Lay out the common part of the workspace, which planes and coefficients follow. Offsets are in bytes.
struct JpegWorkspace {
  int64_t states;        // JpegState per image
  int64_t lookups;       // kJpegMaxTables tables per image
  int64_t group_images;  // uint32 per group: its image
  int64_t tile_images;   // uint32 per tile
  int64_t slots;         // JpegSlot for each thread of each group
  int64_t end;

  TORCH_FASTDET_HOST_DEVICE JpegWorkspace(int64_t images, int64_t groups, int64_t tiles) {
    states = 0;
    lookups = round_up(images * static_cast<int64_t>(sizeof(JpegState)));
    group_images = lookups + round_up(images * kJpegMaxTables * static_cast<int64_t>(sizeof(JpegLookup)));
    tile_images = round_up(group_images + 4 * groups);
    slots = round_up(tile_images + 4 * tiles);
    end = round_up(slots + static_cast<int64_t>(sizeof(JpegSlot)) * kJpegGroup * groups);
  }

  static TORCH_FASTDET_HOST_DEVICE int64_t round_up(int64_t bytes) { return ceil_div(bytes, 256) * 256; }
};

// Count the segments that a region covers, row by row of MCUs. A segment that two rows share counts once.
struct JpegSegmentRange {
  uint32_t first, end;
};
TORCH_FASTDET_HOST_DEVICE JpegSegmentRange jpeg_row_segments(const JpegHeader& h, const JpegRegion& region, int mcu_y) {
  const uint32_t row = static_cast<uint32_t>(mcu_y) * h.mcu_columns;
  uint32_t first = jpeg_segment_of(h, row + static_cast<uint32_t>(region.mcu_x0));
  if (mcu_y > region.mcu_y0) {
    const uint32_t above = jpeg_segment_of(h, row - h.mcu_columns + static_cast<uint32_t>(region.mcu_x1) - 1);
    first = above >= first ? above + 1 : first;
  }
  const uint32_t end = jpeg_segment_of(h, row + static_cast<uint32_t>(region.mcu_x1) - 1) + 1;
  return {first, end > first ? end : first};
}

// Tiles are aligned to whole tiles of the stored image.
TORCH_FASTDET_HOST_DEVICE int jpeg_tile_columns(const JpegRegion& region) {
  return static_cast<int>(ceil_div(region.x1, kJpegTileWidth)) - region.x0 / kJpegTileWidth;
}
TORCH_FASTDET_HOST_DEVICE int jpeg_tile_rows(const JpegRegion& region) {
  return static_cast<int>(ceil_div(region.y1, kJpegTileHeight)) - region.y0 / kJpegTileHeight;
}

struct JpegTotals {
  int64_t decoded_bytes = 0, groups = 0, tiles = 0;
};

// Complete the rows of a plan whose first kJpegAskedColumns are set, given each image's header(i).
template <class Header>
JpegTotals complete_jpeg_plan(int64_t* plan, int64_t images, const Header& header) {
  JpegTotals totals;
  int64_t bytes = 0;
  for (int64_t i = 0; i < images; ++i) {
    int64_t* row = plan + i * kJpegColumns;
    row[kJpegFirstGroup] = totals.groups, row[kJpegFirstTile] = totals.tiles;
    row[kJpegGroups] = row[kJpegTiles] = 0;
    row[kJpegPlanes] = row[kJpegCoefficients] = bytes;
    if (row[kJpegWidth] == 0 || row[kJpegHeight] == 0) continue;
    const JpegHeader& h = header(i);
    const JpegRegion region = jpeg_region(h, {static_cast<int>(row[kJpegX]), static_cast<int>(row[kJpegY]),
                                              static_cast<int>(row[kJpegWidth]), static_cast<int>(row[kJpegHeight])});
    int64_t segments = 0;
    for (int y = region.mcu_y0; y < region.mcu_y1; ++y) {
      const JpegSegmentRange range = jpeg_row_segments(h, region, y);
      segments += range.end - range.first;
    }
    row[kJpegGroups] = ceil_div(segments, kJpegGroup);
    row[kJpegTiles] = int64_t{jpeg_tile_columns(region)} * jpeg_tile_rows(region);
    bytes += int64_t{region.mcus()} * h.mcu_blocks * kJpegBlock;
    row[kJpegCoefficients] = bytes = JpegWorkspace::round_up(bytes);
    bytes += (row[kJpegGroups] * kJpegGroup << h.segment_bits) * h.mcu_blocks * kJpegBlock * 2;
    totals.groups += row[kJpegGroups], totals.tiles += row[kJpegTiles];
  }
  totals.decoded_bytes = bytes;
  return totals;
}

}  // namespace torch_fastdet::core
