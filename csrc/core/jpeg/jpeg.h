// A packed JPEG is one relocatable block of bytes that a decoder can enter anywhere. It holds a header, the tables, an
// index, and the entropy-coded scan without stuffed bytes and markers. jpeg_pack.h writes it; jpeg_loops.h and jpeg.cu
// decode rectangles of it.
//
// MCUs are decoded in segments of 1, 2 or 4, which never cross a restart marker. The index stores where each segment
// begins (a bit of the scan) and the DC predictors there.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/host_device.h"

namespace torch_fastdet::core {

constexpr uint32_t kJpegMagic = 0x324a4654;           // "TFJ2": the format's version
constexpr int kJpegMaxSegmentBits = 2;                // log2 of the MCUs of a segment
constexpr int kJpegAlignment = 16;                    // alignment in bytes of a packed JPEG and of each part in it
constexpr int kJpegBlock = 64;                        // coefficients per block
constexpr int kJpegMaxBlocks = 10;                    // blocks per MCU
constexpr int kJpegMaxTables = 6;                     // a DC and an AC table for each component
constexpr int kJpegMaxSide = 65500;                   // pixels; libjpeg's limit
constexpr int64_t kJpegMaxPixels = int64_t{1} << 30;  // OpenCV's limit

enum class JpegColor : uint8_t { kGrey, kYcc, kRgb };

// Select how a component is upsampled to the size of the image.
enum class JpegUpsampling : uint8_t {
  kBox,      // repeat samples
  kColumns,  // triangle filter along x, ratio 2 x 1
  kRows,     // along y, 1 x 2
  kBoth,     // 2 x 2
};

struct JpegComponent {
  uint8_t h, v;              // blocks in an MCU
  uint8_t ratio_x, ratio_y;  // pixels per sample
  JpegUpsampling upsampling;
  uint8_t dc, ac;  // rows of JpegHeader::table
  uint8_t unused;
  uint16_t width, height;  // samples, without padding
};

struct JpegHeader {
  uint32_t magic;
  uint32_t bytes;  // total size, a multiple of kJpegAlignment
  uint64_t unused;
  uint16_t width, height;  // as stored
  uint8_t orientation;     // EXIF's, 1 to 8
  uint8_t components;      // 1 or 3
  JpegColor color;
  uint8_t mcu_blocks;
  uint8_t h, v;  // maxima over the components
  uint8_t tables;
  uint8_t segment_bits;  // log2 of the MCUs of a segment
  uint32_t mcu_columns, mcu_rows;
  uint32_t interval;           // MCUs between restarts; all MCUs if there are no restarts
  uint32_t interval_segments;  // segments per interval
  uint32_t segments;
  // The parts begin at these offsets, in bytes from the header.
  uint32_t quantizers;             // uint16[64] per component, in zigzag order
  uint32_t table[kJpegMaxTables];  // 16 counts and their symbols, as in the file; DC tables first
  uint32_t starts;                 // uint32 per segment
  uint32_t predictors;             // int16 per segment and component
  uint32_t scan;                   // words of 32 bits, most significant bit first
  uint32_t scan_words;             // padding included
  JpegComponent component[3];
};
constexpr int kJpegHeaderBytes = 128;
static_assert(sizeof(JpegHeader) == kJpegHeaderBytes && kJpegHeaderBytes % kJpegAlignment == 0);

// Return a / b, rounded up. Sides and MCUs fit in 32 bits, and a GPU takes several times as long to divide 64.
TORCH_FASTDET_HOST_DEVICE uint32_t jpeg_ceil_div(uint32_t a, uint32_t b) {
  return (a + b - 1) / b;
}

TORCH_FASTDET_HOST_DEVICE uint32_t jpeg_mcus(const JpegHeader& h) {
  return h.mcu_columns * h.mcu_rows;
}

// Return the MCUs of a segment. The last segment of an interval may have fewer.
TORCH_FASTDET_HOST_DEVICE uint32_t jpeg_segment(const JpegHeader& h) {
  return 1u << h.segment_bits;
}

TORCH_FASTDET_HOST_DEVICE uint32_t jpeg_segment_of(const JpegHeader& h, uint32_t mcu) {
  return mcu / h.interval * h.interval_segments + (mcu % h.interval >> h.segment_bits);
}

struct JpegSpan {
  uint32_t begin, end;
};
TORCH_FASTDET_HOST_DEVICE JpegSpan jpeg_segment_span(const JpegHeader& h, uint32_t segment) {
  const uint32_t restart = segment / h.interval_segments;
  const uint32_t first = restart * h.interval, begin = first + (segment % h.interval_segments << h.segment_bits);
  const uint32_t all = jpeg_mcus(h), rest = h.interval < all - first ? h.interval : all - first;
  const uint32_t end = begin + jpeg_segment(h), last = first + rest;
  return {begin, end < last ? end : last};
}

// Return whether a packed JPEG and its parts lie within `available` bytes, so that no decoder reads outside of it.
TORCH_FASTDET_HOST_DEVICE bool jpeg_is_sound(const JpegHeader& h, int64_t available) {
  if (h.magic != kJpegMagic || h.bytes > available || h.bytes < kJpegHeaderBytes) return false;
  if (h.width < 1 || h.height < 1 || h.orientation < 1 || h.orientation > 8) return false;
  if (h.components != 1 && h.components != 3) return false;
  if (h.color > JpegColor::kRgb || (h.color == JpegColor::kGrey) != (h.components == 1)) return false;
  if (h.h < 1 || h.h > 4 || h.v < 1 || h.v > 4 || h.tables < 2 || h.tables > kJpegMaxTables) return false;
  if (h.mcu_columns != jpeg_ceil_div(h.width, 8 * h.h) || h.mcu_rows != jpeg_ceil_div(h.height, 8 * h.v)) return false;
  const uint32_t mcus = jpeg_mcus(h);
  if (h.interval < 1 || h.interval > mcus) return false;
  if (h.segment_bits > kJpegMaxSegmentBits) return false;
  if (h.interval_segments != jpeg_ceil_div(h.interval, jpeg_segment(h))) return false;
  const uint32_t segments = mcus / h.interval * h.interval_segments + jpeg_ceil_div(mcus % h.interval, jpeg_segment(h));
  const auto lies_inside = [&](int64_t begin, int64_t bytes) {
    return begin >= kJpegHeaderBytes && begin % kJpegAlignment == 0 && begin + bytes <= h.bytes;
  };
  if (h.segments != segments || !lies_inside(h.starts, int64_t{4} * segments)) return false;
  if (!lies_inside(h.predictors, int64_t{2} * segments * h.components)) return false;
  if (!lies_inside(h.quantizers, int64_t{2} * kJpegBlock * h.components)) return false;
  if (h.scan_words < 4 || !lies_inside(h.scan, int64_t{4} * h.scan_words)) return false;
  for (int i = 0; i < h.tables; ++i) {
    if (!lies_inside(h.table[i], 16)) return false;
  }
  int blocks = 0;
  for (int i = 0; i < h.components; ++i) {
    const JpegComponent& c = h.component[i];
    if (c.h < 1 || c.v < 1 || c.h * c.ratio_x != h.h || c.v * c.ratio_y != h.v) return false;
    if (c.upsampling > JpegUpsampling::kBoth || c.dc >= h.tables || c.ac >= h.tables) return false;
    if (c.width != jpeg_ceil_div(h.width * c.h, h.h) || c.height != jpeg_ceil_div(h.height * c.v, h.v)) return false;
    const int x = c.upsampling == JpegUpsampling::kColumns || c.upsampling == JpegUpsampling::kBoth ? 2 : 1;
    const int y = c.upsampling == JpegUpsampling::kRows || c.upsampling == JpegUpsampling::kBoth ? 2 : 1;
    if (c.upsampling != JpegUpsampling::kBox && (c.ratio_x != x || c.ratio_y != y)) return false;
    blocks += c.h * c.v;
  }
  return blocks == h.mcu_blocks && blocks <= kJpegMaxBlocks;
}

// The image is shown as OpenCV shows it: rotated as EXIF says.
TORCH_FASTDET_HOST_DEVICE bool jpeg_swaps_axes(const JpegHeader& h) {
  return h.orientation >= 5;
}
TORCH_FASTDET_HOST_DEVICE int jpeg_shown_width(const JpegHeader& h) {
  return jpeg_swaps_axes(h) ? h.height : h.width;
}
TORCH_FASTDET_HOST_DEVICE int jpeg_shown_height(const JpegHeader& h) {
  return jpeg_swaps_axes(h) ? h.width : h.height;
}

struct JpegRect {
  int x, y, width, height;
};

// Describe a rectangle in stored pixels, [x0, x1) x [y0, y1), and the MCUs that it covers.
struct JpegRegion {
  int x0, y0, x1, y1;
  int mcu_x0, mcu_y0, mcu_x1, mcu_y1;

  TORCH_FASTDET_HOST_DEVICE int plane_width(const JpegComponent& c) const { return (mcu_x1 - mcu_x0) * c.h * 8; }
  TORCH_FASTDET_HOST_DEVICE int plane_height(const JpegComponent& c) const { return (mcu_y1 - mcu_y0) * c.v * 8; }
  // Return the column of the first sample in the component's plane.
  TORCH_FASTDET_HOST_DEVICE int plane_x(const JpegComponent& c) const { return mcu_x0 * c.h * 8; }
  TORCH_FASTDET_HOST_DEVICE int plane_y(const JpegComponent& c) const { return mcu_y0 * c.v * 8; }
  TORCH_FASTDET_HOST_DEVICE int mcus() const { return (mcu_x1 - mcu_x0) * (mcu_y1 - mcu_y0); }
};

// `shown` must lie within the image as it is shown, and must not be empty.
TORCH_FASTDET_HOST_DEVICE JpegRegion jpeg_region(const JpegHeader& h, const JpegRect& shown) {
  const int o = h.orientation;
  JpegRegion r{};
  if (jpeg_swaps_axes(h)) {
    r.x0 = o >= 7 ? h.width - shown.y - shown.height : shown.y;
    r.y0 = o == 6 || o == 7 ? h.height - shown.x - shown.width : shown.x;
    r.x1 = r.x0 + shown.height, r.y1 = r.y0 + shown.width;
  } else {
    r.x0 = o == 2 || o == 3 ? h.width - shown.x - shown.width : shown.x;
    r.y0 = o == 3 || o == 4 ? h.height - shown.y - shown.height : shown.y;
    r.x1 = r.x0 + shown.width, r.y1 = r.y0 + shown.height;
  }
  r.mcu_x0 = r.mcu_y0 = 65535;
  for (int i = 0; i < h.components; ++i) {
    const JpegComponent& c = h.component[i];
    const bool wide = c.upsampling == JpegUpsampling::kColumns || c.upsampling == JpegUpsampling::kBoth;
    const bool high = c.upsampling == JpegUpsampling::kRows || c.upsampling == JpegUpsampling::kBoth;
    int left = r.x0 / c.ratio_x - wide, right = (r.x1 - 1) / c.ratio_x + wide;
    int top = r.y0 / c.ratio_y - high, bottom = (r.y1 - 1) / c.ratio_y + high;
    left = left < 0 ? 0 : left, top = top < 0 ? 0 : top;
    right = right < c.width ? right : c.width - 1, bottom = bottom < c.height ? bottom : c.height - 1;
    const int x0 = left / (8 * c.h), x1 = right / (8 * c.h) + 1, y0 = top / (8 * c.v), y1 = bottom / (8 * c.v) + 1;
    r.mcu_x0 = x0 < r.mcu_x0 ? x0 : r.mcu_x0, r.mcu_y0 = y0 < r.mcu_y0 ? y0 : r.mcu_y0;
    r.mcu_x1 = x1 > r.mcu_x1 ? x1 : r.mcu_x1, r.mcu_y1 = y1 > r.mcu_y1 ? y1 : r.mcu_y1;
  }
  return r;
}

// Stored pixel (x, y) lies first + x * dx + y * dy bytes after the rectangle's first pixel.
struct JpegTurn {
  int64_t first, dx, dy;
};
TORCH_FASTDET_HOST_DEVICE JpegTurn jpeg_turn(const JpegHeader& h, const JpegRect& shown, int64_t pitch) {
  const int o = h.orientation;
  JpegTurn t{-(int64_t{shown.y} * pitch + int64_t{shown.x} * 3), 0, 0};
  if (jpeg_swaps_axes(h)) {
    t.dx = o >= 7 ? -pitch : pitch, t.dy = o == 6 || o == 7 ? -3 : 3;
    t.first += (o >= 7 ? (h.width - 1) * pitch : 0) + (o == 6 || o == 7 ? (h.height - 1) * 3 : 0);
  } else {
    t.dx = o == 2 || o == 3 ? -3 : 3, t.dy = o == 3 || o == 4 ? -pitch : pitch;
    t.first += (o == 2 || o == 3 ? (h.width - 1) * 3 : 0) + (o == 3 || o == 4 ? (h.height - 1) * pitch : 0);
  }
  return t;
}

// A plan has these int64 columns: the request and, from kFirstGroup on, the places that jpeg_plan.h assigns.
enum JpegColumn : int {
  kJpegOffset,  // offset of the packed JPEG in the storage
  kJpegX,       // the rectangle, in the image as it is shown
  kJpegY,
  kJpegWidth,
  kJpegHeight,
  kJpegOut,         // offset of the rectangle's first pixel in the output
  kJpegPitch,       // bytes between rows of the output
  kJpegFirstGroup,  // groups of kJpegGroup segments, each decoded by one thread block
  kJpegGroups,
  kJpegFirstTile,  // tiles of kJpegTileWidth x kJpegTileHeight pixels
  kJpegTiles,
  kJpegPlanes,  // offset after the workspace's common part
  kJpegCoefficients,
  kJpegColumns
};
constexpr int kJpegAskedColumns = kJpegFirstGroup;
constexpr int kJpegGroup = 64;
constexpr int kJpegTileWidth = 128, kJpegTileHeight = 64;

// Decode rectangles of packed JPEGs into one buffer of pixels (uint8, BGR).
struct JpegParams {
  const uint8_t* storage;
  int64_t storage_bytes;
  const int64_t* plan;
  int64_t images;
  uint8_t* out;
  int64_t out_bytes;
  // CUDA needs at least the values that jpeg_plan.h computes; the CPU ignores them.
  int64_t decoded_bytes, groups, tiles;
  uint8_t* workspace;  // JpegWorkspace, followed by decoded_bytes
};

cudaError_t launch_jpeg_decode(const JpegParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
