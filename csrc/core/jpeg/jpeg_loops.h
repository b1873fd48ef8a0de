// Decode rectangles of packed JPEGs on the CPU: entropy decoding and inverse DCT into planes, then rows of colors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/jpeg/jpeg_idct.h"

namespace torch_fastdet::core {

// Read the bits of a packed scan. Reading past its end repeats its last words.
class JpegWordBits {
 public:
  TORCH_FASTDET_HOST_DEVICE JpegWordBits(const uint32_t* words, uint32_t count, uint32_t bit)
      : words_(words), last_(count - 1), next_(std::min(bit / 32, last_)) {
    buffer_ = static_cast<uint64_t>(words_[next_]) << 32;
    advance();
    buffer_ = (buffer_ | words_[next_]) << bit % 32;
    left_ = 64 - bit % 32;
    advance();
  }
  // Return the next 32 bits, of which the caller may skip at most 31.
  TORCH_FASTDET_HOST_DEVICE uint32_t peek() const { return static_cast<uint32_t>(buffer_ >> 32); }
  TORCH_FASTDET_HOST_DEVICE void skip(uint32_t bits) {
    buffer_ <<= bits;
    left_ -= bits;
    if (left_ < 32) {
      buffer_ |= static_cast<uint64_t>(words_[next_]) << (32 - left_);
      left_ += 32;
      advance();
    }
  }

 private:
  TORCH_FASTDET_HOST_DEVICE void advance() { next_ = next_ < last_ ? next_ + 1 : last_; }

  const uint32_t* words_;
  uint32_t last_, next_;
  uint64_t buffer_;
  uint32_t left_;
};

// Dequantize the coefficients that the file has, without clearing the others.
struct JpegDequantizer {
  static constexpr bool kAlways = false;
  JpegCoefficients& out;
  const uint16_t* quantizers;
  TORCH_FASTDET_HOST_DEVICE void operator()(uint32_t i, int value) const {
    const int at = jpeg_natural(static_cast<int>(i));
    out.x[at] = static_cast<int16_t>(jpeg_dequantize(value, quantizers[i]));
    out.last = static_cast<int>(i);
  }
};

// Write a component's samples for pixels [x0, x1) of row y to `out`. `sums` has space for a plane's row plus two.
TORCH_FASTDET_HOST_DEVICE void jpeg_upsample_row(const JpegComponent& c, const JpegPlane& plane, int y, int x0, int x1,
                                                 int16_t* __restrict sums, uint8_t* __restrict out) {
  const int sample_y = y / c.ratio_y;
  const uint8_t* row = jpeg_plane_row(plane, sample_y);
  const uint8_t* near = jpeg_plane_row(plane, y % 2 ? sample_y + 1 : sample_y - 1);
  if (c.ratio_x == 1) {
    const int first = x0 - plane.x0;
    if (c.upsampling == JpegUpsampling::kRows) {
      for (int64_t x = 0; x < x1 - x0; ++x) {
        out[x] = static_cast<uint8_t>(jpeg_between(row[first + x], near[first + x], y % 2));
      }
    } else {
      std::memcpy(out, row + first, static_cast<size_t>(x1 - x0));
    }
    return;
  }
  if (c.upsampling == JpegUpsampling::kBox) {
    for (int x = x0; x < x1; ++x) out[x - x0] = row[x / c.ratio_x - plane.x0];
    return;
  }
  // The ratio is 2. Compute the sums of columns first - 1 to last + 1.
  const bool both = c.upsampling == JpegUpsampling::kBoth;
  const int first = x0 / 2, last = (x1 - 1) / 2, count = last - first + 1;
  const uint8_t* mine = row + (first - plane.x0);
  const uint8_t* other = near + (first - plane.x0);
  int16_t* sum = sums + 1;
  for (int64_t i = 0; i < count; ++i) sum[i] = static_cast<int16_t>(both ? 3 * mine[i] + other[i] : mine[i]);
  const int before = jpeg_plane_column(plane, first - 1), after = jpeg_plane_column(plane, last + 1);
  sum[-1] = static_cast<int16_t>(both ? 3 * row[before] + near[before] : row[before]);
  sum[count] = static_cast<int16_t>(both ? 3 * row[after] + near[after] : row[after]);
  int16_t* const pixels = sum + count + 1;  // 2 * count values, of which the outermost may be unused
  if (both) {
    for (int64_t i = 0; i < count; ++i) {
      pixels[2 * i] = static_cast<int16_t>(jpeg_between_both(sum[i], sum[i - 1], false));
      pixels[2 * i + 1] = static_cast<int16_t>(jpeg_between_both(sum[i], sum[i + 1], true));
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      pixels[2 * i] = static_cast<int16_t>(jpeg_between(sum[i], sum[i - 1], false));
      pixels[2 * i + 1] = static_cast<int16_t>(jpeg_between(sum[i], sum[i + 1], true));
    }
  }
  const int skip = x0 % 2;
  for (int64_t x = 0; x < x1 - x0; ++x) out[x] = static_cast<uint8_t>(pixels[x + skip]);
}

class JpegDecoder {
 public:
  // `packed` must be sound, and the rectangle must lie within the image and not be empty.
  void decode(const uint8_t* packed, const JpegRect& rect, uint8_t* out, int64_t pitch) {
    packed_ = packed;
    header_ = reinterpret_cast<const JpegHeader*>(packed);
    region_ = jpeg_region(*header_, rect);
    const JpegTurn turn = jpeg_turn(*header_, rect, pitch);
    make_room();
#ifdef TORCH_FASTDET_AVX2
    if (has_avx2()) return decode_avx2(out + turn.first, turn);
#endif
    decode_rows<false>(out + turn.first, turn);
  }

 private:
#ifdef TORCH_FASTDET_AVX2
  TORCH_FASTDET_AVX2 void decode_avx2(uint8_t* out, const JpegTurn& turn) {
    decode_rows<true>(out, turn);
  }
#endif

  template <bool kAvx2>
  TORCH_FASTDET_HOST_DEVICE void decode_rows(uint8_t* out, const JpegTurn& turn) {
    for (int y = region_.mcu_y0; y < region_.mcu_y1; ++y) decode_mcu_row<kAvx2>(static_cast<uint32_t>(y));
    color_rows(out, turn);
  }

  void make_room() {
    const JpegHeader& h = *header_;
    size_t bytes = 0;
    for (int i = 0; i < h.components; ++i) {
      bytes += static_cast<size_t>(region_.plane_width(h.component[i])) * region_.plane_height(h.component[i]);
    }
    if (planes_.size() < bytes) planes_.resize(bytes);
    const size_t width = static_cast<size_t>(region_.x1 - region_.x0);
    if (rows_.size() < 3 * width) rows_.resize(3 * width);
    if (sums_.size() < 2 * width + 16) sums_.resize(2 * width + 16);
    uint8_t* at = planes_.data();
    for (int i = 0; i < h.components; ++i) {
      plane_[i] = at;
      at += static_cast<size_t>(region_.plane_width(h.component[i])) * region_.plane_height(h.component[i]);
    }
    lookups_.resize(h.tables);
    for (int i = 0; i < h.tables; ++i) make_lookup(i);
  }

  void make_lookup(int i) {
    const JpegHeader& h = *header_;
    bool is_ac = false;
    for (int j = 0; j < h.components; ++j) is_ac = is_ac || h.component[j].ac == i;
    const uint8_t* table = packed_ + h.table[i];
    JpegLookup& lookup = lookups_[static_cast<size_t>(i)];
    // The bytes after the table are not symbols, but they are readable: a table is never the last part.
    std::memset(lookup.symbols, 0, sizeof lookup.symbols);
    const uint32_t rest = h.bytes - h.table[i] - 16;
    std::memcpy(lookup.symbols, table + 16, std::min<uint32_t>(rest, sizeof lookup.symbols));
    jpeg_long_codes(lookup, table, is_ac);
    for (uint32_t x = 0; x < 1u << kJpegFastBits; ++x) {
      lookup.fast[x] = jpeg_fast_entry(table, lookup.symbols, sizeof lookup.symbols, is_ac, x);
    }
  }

  template <bool kAvx2>
  TORCH_FASTDET_HOST_DEVICE void decode_mcu_row(uint32_t y) {
    const JpegHeader& h = *header_;
    const auto left = static_cast<uint32_t>(region_.mcu_x0), right = static_cast<uint32_t>(region_.mcu_x1);
    const uint32_t first = y * h.mcu_columns + left, end = y * h.mcu_columns + right;
    const auto* starts = reinterpret_cast<const uint32_t*>(packed_ + h.starts);
    const auto* predictors = reinterpret_cast<const int16_t*>(packed_ + h.predictors);
    const auto* scan = reinterpret_cast<const uint32_t*>(packed_ + h.scan);
    const auto* quantizers = reinterpret_cast<const uint16_t*>(packed_ + h.quantizers);
    JpegCoefficients block;
    std::memset(&block, 0, sizeof block);
    for (uint32_t segment = jpeg_segment_of(h, first); segment < h.segments; ++segment) {
      const JpegSpan span = jpeg_segment_span(h, segment);
      if (span.begin >= end) break;
      JpegWordBits bits(scan, h.scan_words, starts[segment]);
      int predictor[3] = {0, 0, 0};
      for (int i = 0; i < h.components; ++i) predictor[i] = predictors[int64_t{segment} * h.components + i];
      for (uint32_t mcu = span.begin; mcu < span.end && mcu < end; ++mcu) {
        for (int i = 0; i < h.components; ++i) {
          const JpegComponent& c = h.component[i];
          const JpegLookup &dc = lookups_[c.dc], &ac = lookups_[c.ac];
          const uint16_t* quantizer = quantizers + i * kJpegBlock;
          const int pitch = region_.plane_width(c);
          for (int by = 0; by < c.v; ++by) {
            for (int bx = 0; bx < c.h; ++bx) {
              jpeg_decode_block(bits, dc, ac, predictor[i], JpegDequantizer{block, quantizer});
              if (mcu >= first) {
                const auto column = static_cast<int64_t>(mcu - first) * c.h + bx;
                const auto row = static_cast<int64_t>(y - static_cast<uint32_t>(region_.mcu_y0)) * c.v + by;
                jpeg_idct_block<kAvx2>(block, plane_[i] + row * 8 * pitch + column * 8, pitch);
              }
              std::memset(block.x, 0, sizeof block.x);
            }
          }
        }
      }
    }
  }

  TORCH_FASTDET_HOST_DEVICE void color_rows(uint8_t* out, const JpegTurn& turn) {
    const JpegHeader& h = *header_;
    const int x0 = region_.x0, x1 = region_.x1, width = x1 - x0;
    JpegPlane planes[3];
    for (int i = 0; i < h.components; ++i) planes[i] = jpeg_plane(h.component[i], region_, plane_[i]);
    uint8_t* rows[3] = {rows_.data(), rows_.data() + width, rows_.data() + 2 * width};
    for (int y = region_.y0; y < region_.y1; ++y) {
      for (int i = 0; i < h.components; ++i) {
        jpeg_upsample_row(h.component[i], planes[i], y, x0, x1, sums_.data(), rows[i]);
      }
      uint8_t* to = out + y * turn.dy + x0 * turn.dx;
      if (h.color == JpegColor::kYcc) ycc_to_rgb(rows[0], rows[1], rows[2], width);
      const uint8_t* const blue = h.color == JpegColor::kGrey ? rows[0] : rows[2];
      const uint8_t* const green = h.color == JpegColor::kGrey ? rows[0] : rows[1];
      store_row(blue, green, rows[0], width, to, turn.dx);
    }
  }

  // Convert in place. A 32-bit counter that may wrap (-fwrapv) would prevent vector code, so counters have 64 bits.
  static TORCH_FASTDET_HOST_DEVICE void ycc_to_rgb(uint8_t* __restrict first, uint8_t* __restrict second,
                                                   uint8_t* __restrict third, int64_t width) {
    for (int64_t x = 0; x < width; ++x) {
      int b, g, r;
      jpeg_ycc_to_bgr(first[x], second[x], third[x], b, g, r);
      first[x] = static_cast<uint8_t>(jpeg_clamp(r)), second[x] = static_cast<uint8_t>(jpeg_clamp(g));
      third[x] = static_cast<uint8_t>(jpeg_clamp(b));
    }
  }

  static TORCH_FASTDET_HOST_DEVICE void store_row(const uint8_t* blue, const uint8_t* green, const uint8_t* red,
                                                  int64_t width, uint8_t* __restrict to, int64_t dx) {
    if (dx == 3) {
      for (int64_t x = 0; x < width; ++x) to[3 * x] = blue[x], to[3 * x + 1] = green[x], to[3 * x + 2] = red[x];
    } else {
      for (int x = 0; x < width; ++x, to += dx) to[0] = blue[x], to[1] = green[x], to[2] = red[x];
    }
  }

  const uint8_t* packed_ = nullptr;
  const JpegHeader* header_ = nullptr;
  JpegRegion region_{};
  std::vector<uint8_t> planes_, rows_;
  std::vector<int16_t> sums_;
  std::vector<JpegLookup> lookups_;
  uint8_t* plane_[3]{};
};

// Return null, or what is wrong with row `i` of a plan.
inline const char* jpeg_row_fault(const JpegParams& p, int64_t i) {
  const int64_t* row = p.plan + i * kJpegColumns;
  const int64_t offset = row[kJpegOffset], x = row[kJpegX], y = row[kJpegY];
  const int64_t width = row[kJpegWidth], height = row[kJpegHeight], out = row[kJpegOut], pitch = row[kJpegPitch];
  if (width == 0 || height == 0) return nullptr;
  if (offset < 0 || offset % kJpegAlignment || offset > p.storage_bytes - kJpegHeaderBytes ||
      !jpeg_is_sound(*reinterpret_cast<const JpegHeader*>(p.storage + offset), p.storage_bytes - offset)) {
    return "there is no packed JPEG at its offset";
  }
  const auto& h = *reinterpret_cast<const JpegHeader*>(p.storage + offset);
  if (x < 0 || y < 0 || width < 0 || height < 0 || width > jpeg_shown_width(h) - x ||
      height > jpeg_shown_height(h) - y) {
    return "its rectangle is not in the image";
  }
  if (pitch < 3 * width || pitch > p.out_bytes || out < 0 || out > p.out_bytes ||
      (height - 1) * pitch + 3 * width > p.out_bytes - out) {
    return "its pixels do not fit into out";
  }
  return nullptr;
}

// parallel_for(begin, end, grain, f) calls f(begin, end) over images. The rows must have no fault.
template <class ParallelFor>
void decode_jpegs(const JpegParams& p, const ParallelFor& parallel_for) {
  parallel_for(int64_t{0}, p.images, int64_t{1}, [&](int64_t begin, int64_t end) {
    JpegDecoder decoder;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t* row = p.plan + i * kJpegColumns;
      if (row[kJpegWidth] == 0 || row[kJpegHeight] == 0) continue;
      const JpegRect rect{static_cast<int>(row[kJpegX]), static_cast<int>(row[kJpegY]),
                          static_cast<int>(row[kJpegWidth]), static_cast<int>(row[kJpegHeight])};
      decoder.decode(p.storage + row[kJpegOffset], rect, p.out + row[kJpegOut], row[kJpegPitch]);
    }
  });
}

}  // namespace torch_fastdet::core
