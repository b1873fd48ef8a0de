// These functions are bitwise identical to libjpeg-turbo's vector code: Huffman codes, "islow" inverse DCT, upsampling
// and colors.
#pragma once

#include <cstdint>

#include "core/jpeg/jpeg.h"

namespace torch_fastdet::core {

// Return the row-major position of a file's i-th coefficient.
TORCH_FASTDET_HOST_DEVICE int jpeg_natural(int i) {
  static constexpr uint8_t kOrder[kJpegBlock] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,
                                                 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
                                                 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
                                                 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};
  return kOrder[i];
}

// An entry of a look-up table has 5 bits for the code's and value's length, 4 for the value's, 7 for the index step.
constexpr int kJpegFastBits = 9;
struct alignas(16) JpegLookup {
  uint16_t fast[1 << kJpegFastBits];  // indexed by the next bits; 0: the code is longer
  // A code of length kJpegFastBits + 1 + i is below limit[i], as 16 bits. row[i] plus the code is its row.
  uint32_t limit[16 - kJpegFastBits];
  int32_t row[16 - kJpegFastBits];
  uint32_t is_ac, unused;
  uint8_t symbols[256];
};

constexpr uint32_t kJpegEndOfBlock = 64;
TORCH_FASTDET_HOST_DEVICE uint32_t jpeg_entry(uint32_t length, uint32_t symbol, bool is_ac) {
  if (!is_ac) return (length + (symbol & 15)) | (symbol & 15) << 5 | 1u << 9;
  const uint32_t run = symbol >> 4, size = symbol & 15;
  const uint32_t grows = size ? run + 1 : run == 15 ? 16 : kJpegEndOfBlock;
  return (length + size) | size << 5 | grows << 9;
}

// Return the entry of a code that is longer than kJpegFastBits. `bits` are the next 16. An unknown code ends the block.
TORCH_FASTDET_HOST_DEVICE uint32_t jpeg_long_entry(const JpegLookup& table, uint32_t bits) {
  constexpr int kLengths = 16 - kJpegFastBits;
  int shorter = 0;  // number of lengths below the code's
  int32_t row = table.row[0];
  for (int i = 0; i < kLengths; ++i) {  // branch-free, so that a GPU waits only once
    const bool is_longer = bits >= table.limit[i];
    shorter += is_longer;
    if (i + 1 < kLengths) row = is_longer ? table.row[i + 1] : row;
  }
  if (shorter == kLengths) return kJpegEndOfBlock << 9;
  const uint32_t length = kJpegFastBits + 1 + shorter;
  row += static_cast<int32_t>(bits >> (16 - length));
  return jpeg_entry(length, table.symbols[row & 255], table.is_ac);
}

// Fill in everything in a table except `fast`, from the 16 counts and the symbols of a DHT.
TORCH_FASTDET_HOST_DEVICE void jpeg_long_codes(JpegLookup& table, const uint8_t* counts, bool is_ac) {
  uint32_t code = 0;
  int32_t row = 0;
  for (int length = 1; length <= 16; ++length) {
    const int i = length - kJpegFastBits - 1;
    if (i >= 0) table.row[i] = row - static_cast<int32_t>(code);
    code += counts[length - 1], row += counts[length - 1];
    if (i >= 0) table.limit[i] = code << (16 - length);
    code <<= 1;
  }
  table.is_ac = is_ac, table.unused = 0;
}

// Return element x of `fast`. `symbols` has `size` bytes; a damaged table may ask for more.
TORCH_FASTDET_HOST_DEVICE uint16_t jpeg_fast_entry(const uint8_t* counts, const uint8_t* symbols, uint32_t size,
                                                   bool is_ac, uint32_t x) {
  uint32_t code = 0;
  uint32_t row = 0;
  for (int length = 1; length <= kJpegFastBits; ++length) {
    const uint32_t count = counts[length - 1], mine = x >> (kJpegFastBits - length);
    if (mine < code + count) {
      const uint32_t at = (row + mine - code) & 255;
      return static_cast<uint16_t>(jpeg_entry(length, at < size ? symbols[at] : 0, is_ac));
    }
    row += count;
    code = (code + count) << 1;
  }
  return 0;
}

// Return the value whose `size` bits end at bit `total` of `next`. The result is arbitrary if `size` is 0.
TORCH_FASTDET_HOST_DEVICE int jpeg_value(uint32_t next, uint32_t total, uint32_t size) {
  const uint32_t top = next << (total - size);  // the value's first bit is its sign: 0 means negative
  const int negative = ~(static_cast<int32_t>(top) >> 31);
  const int magnitude = static_cast<int>((top ^ static_cast<uint32_t>(negative)) >> 1 >> (31 - size));
  return (magnitude ^ negative) - negative;
}

// Decode a block: call store(i, value) for DC and for each nonzero coefficient, with i in the file's order. If
// Store::kAlways is set, call it for codes without a coefficient too, with i = kJpegBlock. `Bits` has peek(), which
// returns the next 32 bits, and skip(n). Never read more than 64 codes, whatever the bits are.
template <class Bits, class Table, class Store>
TORCH_FASTDET_HOST_DEVICE void jpeg_decode_block(Bits& bits, const Table& dc, const Table& ac, int& predictor,
                                                 Store&& store) {
  uint32_t next = bits.peek();
  uint32_t entry = dc.fast[next >> (32 - kJpegFastBits)];
  if (!entry) entry = jpeg_long_entry(dc, next >> 16);
  uint32_t size = entry >> 5 & 15;
  bits.skip(entry & 31);
  if (size) predictor += jpeg_value(next, entry & 31, size);
  store(0, predictor);
  uint32_t i = 1;
  do {
    next = bits.peek();
    entry = ac.fast[next >> (32 - kJpegFastBits)];
    if (!entry) entry = jpeg_long_entry(ac, next >> 16);
    size = entry >> 5 & 15;
    bits.skip(entry & 31);
    i += entry >> 9;
    if (Store::kAlways || size) store(size ? (i - 1) & 63 : kJpegBlock, jpeg_value(next, entry & 31, size));
  } while (i < kJpegBlock);
}

TORCH_FASTDET_HOST_DEVICE int jpeg_wrap16(int x) {
  return static_cast<int16_t>(static_cast<uint16_t>(x));
}
TORCH_FASTDET_HOST_DEVICE int jpeg_dequantize(int coefficient, int quantizer) {
  return jpeg_wrap16(static_cast<int>(static_cast<uint32_t>(coefficient) * static_cast<uint32_t>(quantizer)));
}

// This type is one lane of the transform; the CPU's has eight, passed by reference because registers may be missing.
struct JpegLane {
  using Signed = int;
  using Unsigned = uint32_t;
  static TORCH_FASTDET_HOST_DEVICE void wrap16(int& x) { x = jpeg_wrap16(x); }
  static TORCH_FASTDET_HOST_DEVICE void saturate16(int& x) { x = x > 32767 ? 32767 : x < -32768 ? -32768 : x; }
};

// Transform eight points by Loeffler, Ligtenberg and Moschytz. kShift is 11 for columns, then 18 for rows. Sums may
// wrap to 16 bits.
template <int kShift, class Lanes = JpegLane, class I = typename Lanes::Signed>
TORCH_FASTDET_HOST_DEVICE void jpeg_idct8(I& x0, I& x1, I& x2, I& x3, I& x4, I& x5, I& x6, I& x7) {
  using U = typename Lanes::Unsigned;
  constexpr uint32_t kHalf = uint32_t{1} << (kShift - 1);
  I s04 = x0 + x4, d04 = x0 - x4, s37 = x7 + x3, s15 = x5 + x1;
  Lanes::wrap16(s04), Lanes::wrap16(d04), Lanes::wrap16(s37), Lanes::wrap16(s15);
  const U e = U(s04) * 8192u + kHalf, g = U(d04) * 8192u + kHalf;
  const U z = U(x2 + x6) * 4433u, t3 = z + U(x2) * 6270u, t2 = z - U(x6) * 15137u;
  const U a0 = e + t3, a3 = e - t3, a1 = g + t2, a2 = g - t2;
  const U z3 = U(s37), z4 = U(s15), z5 = (z3 + z4) * 9633u;
  const U p3 = z5 - z3 * 16069u, p4 = z5 - z4 * 3196u, p1 = U(x7 + x1) * 7373u, p2 = U(x5 + x3) * 20995u;
  const U o7 = U(x7) * 2446u + (p3 - p1), o5 = U(x5) * 16819u + (p4 - p2);
  const U o3 = U(x3) * 25172u + (p3 - p2), o1 = U(x1) * 12299u + (p4 - p1);
  x0 = I(a0 + o1) >> kShift, x7 = I(a0 - o1) >> kShift;
  x1 = I(a1 + o3) >> kShift, x6 = I(a1 - o3) >> kShift;
  x2 = I(a2 + o5) >> kShift, x5 = I(a2 - o5) >> kShift;
  x3 = I(a3 + o7) >> kShift, x4 = I(a3 - o7) >> kShift;
  Lanes::saturate16(x0), Lanes::saturate16(x1), Lanes::saturate16(x2), Lanes::saturate16(x3);
  Lanes::saturate16(x4), Lanes::saturate16(x5), Lanes::saturate16(x6), Lanes::saturate16(x7);
}

// Compute the column pass if rows 1 to 7 are all zero. It wraps and does not saturate.
TORCH_FASTDET_HOST_DEVICE int jpeg_idct_flat_column(int x0) {
  return jpeg_wrap16(4 * x0);
}

TORCH_FASTDET_HOST_DEVICE int jpeg_clamp(int x) {
  return x < 0 ? 0 : x > 255 ? 255 : x;
}

// Apply a triangle filter to samples or their sums. `near` is on the output's side; `second` means right or below.
TORCH_FASTDET_HOST_DEVICE int jpeg_between(int sample, int near, bool second) {
  return (3 * sample + near + 1 + second) >> 2;
}
TORCH_FASTDET_HOST_DEVICE int jpeg_between_both(int sum, int near, bool second) {
  return (3 * sum + near + 8 - second) >> 4;
}

// Describe a component's plane in memory, the samples of a region. Samples outside of the real image are clamped.
struct JpegPlane {
  const uint8_t* data;
  int pitch;
  int x0, y0;          // the sample that is first in memory
  int last_x, last_y;  // last readable sample
};

TORCH_FASTDET_HOST_DEVICE JpegPlane jpeg_plane(const JpegComponent& c, const JpegRegion& region, const uint8_t* data) {
  const int x0 = region.plane_x(c), y0 = region.plane_y(c);
  const int right = x0 + region.plane_width(c), bottom = y0 + region.plane_height(c);
  return {
      data, right - x0, x0, y0, (right < c.width ? right : c.width) - 1, (bottom < c.height ? bottom : c.height) - 1};
}

TORCH_FASTDET_HOST_DEVICE int jpeg_clamp_to(int x, int low, int high) {
  return x < low ? low : x > high ? high : x;
}

TORCH_FASTDET_HOST_DEVICE const uint8_t* jpeg_plane_row(const JpegPlane& plane, int y) {
  return plane.data + static_cast<int64_t>(jpeg_clamp_to(y, plane.y0, plane.last_y) - plane.y0) * plane.pitch;
}
TORCH_FASTDET_HOST_DEVICE int jpeg_plane_column(const JpegPlane& plane, int x) {
  return jpeg_clamp_to(x, plane.x0, plane.last_x) - plane.x0;
}

// The results are not clamped yet.
TORCH_FASTDET_HOST_DEVICE void jpeg_ycc_to_bgr(int y, int cb, int cr, int& b, int& g, int& r) {
  constexpr int kHalf = 32768;
  b = y + ((116130 * cb + (kHalf - 128 * 116130)) >> 16);
  g = y + ((-22554 * cb - 46802 * cr + (kHalf + 128 * (22554 + 46802))) >> 16);
  r = y + ((91881 * cr + (kHalf - 128 * 91881)) >> 16);
}

}  // namespace torch_fastdet::core
