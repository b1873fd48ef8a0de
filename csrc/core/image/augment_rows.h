// Augment images on the CPU row by row, without building a canvas. From the warp to the output, a row has one 32-bit
// word per pixel, b | g << 8 | r << 16 (for grey the level alone), so that vector code has one lane per pixel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/image/augment_math.h"

namespace torch_fastdet::core {

constexpr uint32_t kBorderWord[] = {kBorder, kBorder | kBorder << 8 | kBorder << 16};

template <int kChannels>
TORCH_FASTDET_HOST_DEVICE uint32_t pack_pixel(const Pixel<kChannels>& pixel) {
  uint32_t word = 0;
  for (int c = 0; c < kChannels; ++c) word |= static_cast<uint32_t>(pixel.v[c]) << (8 * c);
  return word;
}

template <int kChannels>
inline Pixel<kChannels> unpack_pixel(uint32_t word) {
  Pixel<kChannels> pixel;
  for (int c = 0; c < kChannels; ++c) pixel.v[c] = static_cast<int>(word >> (8 * c) & 255);
  return pixel;
}

template <int kChannels>
TORCH_FASTDET_HOST_DEVICE Pixel<kChannels> sample_point(const Layer& layer, WarpPoint point) {
  return sample_fixed<kChannels>(layer, point);
}
template <int kChannels>
TORCH_FASTDET_HOST_DEVICE Pixel<kChannels> sample_point(const Layer& layer, FloatPoint point) {
  return sample_float<kChannels>(layer, point);
}

// Describe a row of a layer under an affine map in fixed point. Like FloatLine, it gives the points of its columns.
struct FixedLine {
  const int *column_x, *column_y;
  int row_x, row_y;
  WarpPoint at(int x) const { return {affine_coordinate(column_x[x], row_x), affine_coordinate(column_y[x], row_y)}; }
};

// Do the same for a perspective map.
struct FixedPerspective {
  const InverseMap* map;
  int y, block;
  WarpPoint at(int x) const { return perspective_point(*map, x, y, block); }
};

inline int pixel_x(const FixedLine& line, int x) {
  return line.at(x).x >> kWarpBits;
}
inline int pixel_y(const FixedLine& line, int x) {
  return line.at(x).y >> kWarpBits;
}
inline int pixel_x(const FloatLine& line, int x) {
  return float_pixel(line.at(x).x);
}
inline int pixel_y(const FloatLine& line, int x) {
  return float_pixel(line.at(x).y);
}

// Describe columns [begin, end) of a row whose squares all lie in one patch.
template <typename Line>
struct WarpSpan {
  const Patch* patch;
  const Line* line;
  int begin, end;
  uint32_t* out;
};

template <int kChannels>
inline void warp_span(const WarpSpan<FixedLine>& s) {
  for (int x = s.begin; x < s.end; ++x) {
    const WarpPoint p = s.line->at(x);
    const uint8_t* at = s.patch->at(p.x >> kWarpBits, p.y >> kWarpBits, kChannels);
    const uint8_t* below = at + s.patch->pitch;
    Pixel<kChannels> pixel;
    for (int c = 0; c < kChannels; ++c) {
      pixel.v[c] = blend_fixed(at[c], at[c + kChannels], below[c], below[c + kChannels], p.x & kWarpFraction,
                               p.y & kWarpFraction);
    }
    s.out[x] = pack_pixel(pixel);
  }
}

template <int kChannels, typename Line>
TORCH_FASTDET_HOST_DEVICE void warp_points(const Layer& layer, const Line& line, int begin, int end, uint32_t* out) {
  for (int x = begin; x < end; ++x) out[x] = pack_pixel(sample_point<kChannels>(layer, line.at(x)));
}

template <int kChannels>
TORCH_FASTDET_HOST_DEVICE void warp_span(const WarpSpan<FloatLine>& s) {
  for (int x = s.begin; x < s.end; ++x) {
    const FloatPoint p = s.line->at(x);
    const float left = ::floorf(p.x), top = ::floorf(p.y);
    const uint8_t* at = s.patch->at(static_cast<int>(left), static_cast<int>(top), kChannels);
    const uint8_t* below = at + s.patch->pitch;
    Pixel<kChannels> pixel;
    for (int c = 0; c < kChannels; ++c) {
      pixel.v[c] =
          blend_float(at[c], at[c + kChannels], below[c], below[c + kChannels], sub_rn(p.x, left), sub_rn(p.y, top));
    }
    s.out[x] = pack_pixel(pixel);
  }
}

inline void recolor_span(const ColorTables& tables, uint32_t* row, int begin, int end, bool round) {
  for (int x = begin; x < end; ++x) row[x] = pack_pixel(recolor(tables, unpack_pixel<3>(row[x]), round));
}

// Expand bytes of three channels to words.
inline void expand(const uint8_t* from, uint32_t* words, int count) {
  for (int x = 0; x < count; ++x) words[x] = pack_pixel(load_pixel<3>(from + 3 * x));
}

// Extract the byte that `shift` moves to the bottom of each word.
inline void plane(const uint32_t* row, int width, int shift, uint8_t* to) {
  for (int x = 0; x < width; ++x) to[x] = static_cast<uint8_t>(row[x] >> shift);
}

// An instruction set may replace these steps; the AVX2 versions are in augment_avx2.h.
struct RowKernels {
  void (*warp_fixed3)(const WarpSpan<FixedLine>&);
  void (*warp_float3)(const WarpSpan<FloatLine>&);
  void (*warp_points3)(const Layer&, const FloatLine&, int begin, int end, uint32_t* out);
  void (*recolor)(const ColorTables&, uint32_t* row, int begin, int end, bool round);
  void (*expand3)(const uint8_t* from, uint32_t* words, int count);
  void (*plane)(const uint32_t* row, int width, int shift, uint8_t* to);
};

inline RowKernels plain_row_kernels() {
  return {warp_span<3>, warp_span<3>, warp_points<3>, recolor_span, expand, plane};
}

template <int kChannels>
inline void expand_row(const RowKernels& kernels, const uint8_t* from, uint32_t* words, int count) {
  if (kChannels == 3) {
    kernels.expand3(from, words, count);
  } else {
    for (int x = 0; x < count; ++x) words[x] = from[x];
  }
}

// Store row y of image n from words. `value(level)` returns the element.
template <typename T, int kChannels, typename Value>
inline void store_words(const BatchOut& out, int64_t n, int y, const uint32_t* row, bool keep_bgr, const Value& value) {
  T* data = static_cast<T*>(out.data);
  const int64_t step = out.channels_last ? kChannels : 1;
  for (int c = 0; c < kChannels; ++c) {
    const int shift = 8 * (keep_bgr ? c : kChannels - 1 - c);
    T* to = data + batch_index(out, n, c, y, 0);
    for (int x = 0; x < out.width; ++x) to[x * step] = value(row[x] >> shift & 255);
  }
}

// Write a batch. `levels` has the element for each of the 256 levels, and is not used for uint8.
struct RowStore {
  const BatchOut& out;
  const void* levels;
  const RowKernels& kernels;

  template <int kChannels>
  void store(int64_t n, int y, const uint32_t* row, bool keep_bgr) const {
    if (out.type == PixelType::kUint8 && out.channels_last) {
      store_words<uint8_t, kChannels>(out, n, y, row, keep_bgr,
                                      [](uint32_t level) { return static_cast<uint8_t>(level); });
    } else if (out.type == PixelType::kUint8) {
      for (int c = 0; c < kChannels; ++c) {
        kernels.plane(row, out.width, 8 * (keep_bgr ? c : kChannels - 1 - c),
                      static_cast<uint8_t*>(out.data) + batch_index(out, n, c, y, 0));
      }
    } else if (out.type == PixelType::kFloat16) {
      store_levels<uint16_t, kChannels>(n, y, row, keep_bgr);
    } else {
      store_levels<float, kChannels>(n, y, row, keep_bgr);
    }
  }

 private:
  template <typename T, int kChannels>
  void store_levels(int64_t n, int y, const uint32_t* row, bool keep_bgr) const {
    const T* table = static_cast<const T*>(levels);
    store_words<T, kChannels>(out, n, y, row, keep_bgr, [table](uint32_t level) { return table[level]; });
  }
};

// Hold one image of the batch: its parsed tables, and the values that depend only on the column.
template <int kChannels>
class AugmentImage {
 public:
  AugmentImage(const AugmentParams& params, int64_t n, const RowStore& store)
      : p_(params), n_(n), store_(store), kernels_(store.kernels), row_(words()), second_row_(words()) {
    const int64_t* image = p_.images + n * kImageColumns;
    flags_ = static_cast<int>(image[2]);
    mixed_ = image[1] >= 0 && p_.blend;
    recolored_ = kChannels == 3 && p_.tables && image[3] >= 0 && image[3] < p_.table_rows;
    for (int which = 0; which < (mixed_ ? 2 : 1); ++which) read_layer(image[which], which);
    if (recolored_) {
      for (int i = 0; i < 256; ++i) fill_color_tables(colors_, p_.tables + image[3] * 768, i);
    }
  }

  // Write rows [begin, end) of the image, counted before it is flipped.
  void run(int begin, int end) {
    const int width = p_.out.width;
    for (int y = begin; y < end; ++y) {
      uint32_t* row = row_.data();
      sample_row(0, y, row);
      if (mixed_) {
        sample_row(1, y, second_row_.data());
        mix_rows(row);
      }
      if (recolored_) {
        const int truncated = p_.hsv_lanes > 0 ? width / p_.hsv_lanes * p_.hsv_lanes : 0;
        kernels_.recolor(colors_, row, 0, truncated, false);
        kernels_.recolor(colors_, row, truncated, width, true);
      }
      if (flags_ & kFlipLeftRight) std::reverse(row, row + width);
      const int out_y = flags_ & kFlipUpDown ? p_.out.height - 1 - y : y;
      store_.template store<kChannels>(n_, out_y, row, flags_ & kKeepBgr);
    }
  }

 private:
  // Leave space for vector code, which writes whole vectors.
  size_t words() const { return static_cast<size_t>(p_.out.width) + 16; }

  void read_layer(int64_t index, int which) {
    Layer& layer = layer_[which];
    read_layer_head(p_, index, layer);
    for (int i = 0; i < layer.count; ++i) layer.patch[i] = read_layer_patch(p_, index, layer, i);
    if (layer.warp == WarpKind::kNone) return;
    layer.map = read_layer_map(p_, index, layer);
    if (layer.warp == WarpKind::kPerspective) return;
    for (int i = 0; i < layer.count; ++i) {
      add_edges(edges_x_[which], layer.patch[i].x0, layer.patch[i].x1);
      add_edges(edges_y_[which], layer.patch[i].y0, layer.patch[i].y1);
    }
    if (p_.arithmetic != WarpArithmetic::kFixed) return;
    column_x_[which].resize(words());
    column_y_[which].resize(words());
    for (int x = 0; x < p_.out.width; ++x) {
      column_x_[which][x] = affine_column(layer.map.m[0], x);
      column_y_[which][x] = affine_column(layer.map.m[3], x);
    }
  }

  void sample_row(int which, int y, uint32_t* row) {
    const Layer& layer = layer_[which];
    const int width = p_.out.width;
    if (layer.warp == WarpKind::kNone) {
      copy_row(layer, y, row);
    } else if (p_.arithmetic == WarpArithmetic::kFloat) {
      const FloatLine line = float_line(layer.map, layer.warp, y);
      if (line.perspective) {
        sample_points(layer, line, 0, width, row);
      } else {
        row_spans(layer, which, line, row);
      }
    } else if (layer.warp == WarpKind::kPerspective) {
      const FixedPerspective line{&layer.map, y, perspective_block(width, p_.out.height)};
      sample_points(layer, line, 0, width, row);
    } else {
      const double* m = layer.map.m;
      const FixedLine line{column_x_[which].data(), column_y_[which].data(), affine_row(m[1], m[2], y),
                           affine_row(m[4], m[5], y)};
      row_spans(layer, which, line, row);
    }
  }

  void copy_row(const Layer& layer, int y, uint32_t* row) {
    const int width = p_.out.width;
    if (layer.mask) {
      for (int x = 0; x < width; ++x) row[x] = pack_pixel(load_pixel<kChannels>(canvas_pixel(layer, x, y, kChannels)));
      return;
    }
    std::fill(row, row + width, kBorderWord[kChannels == 3]);
    for (int i = 0; i < layer.count; ++i) {
      const Patch& patch = layer.patch[i];
      if (y < patch.y0 || y >= patch.y1) continue;
      const uint8_t* at = patch.at(patch.x0, y, kChannels);
      const int end = std::min(patch.x1, width);
      if (patch.x0 < end) expand_row<kChannels>(kernels_, at, row + patch.x0, end - patch.x0);
    }
  }

  // Add the positions at which a square enters or leaves a patch.
  static void add_edges(std::vector<int>& edges, int begin, int end) {
    for (const int edge : {begin - 1, begin, end - 1, end}) {
      if (std::find(edges.begin(), edges.end(), edge) == edges.end()) edges.push_back(edge);
    }
  }

  // A row crosses each edge at most once. Between crossings, all squares lie in one patch, in none or across an edge.
  template <typename Line>
  void row_spans(const Layer& layer, int which, const Line& line, uint32_t* row) {
    cuts_.assign({0, p_.out.width});
    if (!layer.mask) {
      add_crossings([&](int x) { return pixel_x(line, x); }, edges_x_[which]);
      add_crossings([&](int x) { return pixel_y(line, x); }, edges_y_[which]);
      std::sort(cuts_.begin(), cuts_.end());
    }
    for (size_t i = 0; i + 1 < cuts_.size(); ++i) {
      if (cuts_[i] < cuts_[i + 1]) fill_span(layer, line, cuts_[i], cuts_[i + 1], row);
    }
  }

  // `pixel(x)` returns the pixel of column x along the axis of the edges.
  template <typename PixelOf>
  void add_crossings(const PixelOf& pixel, const std::vector<int>& edges) {
    const int first = pixel(0), last = pixel(p_.out.width - 1);
    if (first == last) return;
    for (const int edge : edges) {
      if ((first < edge) != (last < edge)) cuts_.push_back(crossing(pixel, edge));
    }
  }

  // Return the first column whose pixel is on the other side of `edge` than column 0's. The last column's is there.
  template <typename PixelOf>
  int crossing(const PixelOf& pixel, int edge) const {
    const bool first = pixel(0) < edge;
    int low = 0, high = p_.out.width - 1;
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      ((pixel(middle) < edge) == first ? low : high) = middle;
    }
    return high;
  }

  template <typename Line>
  void fill_span(const Layer& layer, const Line& line, int begin, int end, uint32_t* row) {
    const int y = pixel_y(line, begin);
    const int i = patch_of_square(layer, pixel_x(line, begin), y);
    if (i == -1) {
      std::fill(row + begin, row + end, kBorderWord[kChannels == 3]);
    } else if (i == -2) {
      sample_points(layer, line, begin, end, row);
    } else {
      const WarpSpan<Line> span{&layer.patch[i], &line, begin, end, row};
      const int lowest = std::max(y, pixel_y(line, end - 1));
      if (kChannels == 3 && !(span.patch->tight && lowest + 2 >= span.patch->y1)) {
        warp_span3(span);
      } else {
        warp_span<kChannels>(span);
      }
    }
  }

  void warp_span3(const WarpSpan<FixedLine>& span) const { kernels_.warp_fixed3(span); }
  void warp_span3(const WarpSpan<FloatLine>& span) const { kernels_.warp_float3(span); }

  template <typename Line>
  void sample_points(const Layer& layer, const Line& line, int begin, int end, uint32_t* row) const {
    warp_points<kChannels>(layer, line, begin, end, row);
  }
  void sample_points(const Layer& layer, const FloatLine& line, int begin, int end, uint32_t* row) const {
    if (kChannels == 3) {
      kernels_.warp_points3(layer, line, begin, end, row);
    } else {
      warp_points<kChannels>(layer, line, begin, end, row);
    }
  }

  void mix_rows(uint32_t* row) {
    const double r = p_.blend[n_], rest = 1. - r;
    for (int x = 0; x < p_.out.width; ++x) {
      const Pixel<kChannels> a = unpack_pixel<kChannels>(row[x]), b = unpack_pixel<kChannels>(second_row_[x]);
      Pixel<kChannels> pixel;
      for (int c = 0; c < kChannels; ++c) pixel.v[c] = mix(a.v[c], b.v[c], r, rest);
      row[x] = pack_pixel(pixel);
    }
  }

  const AugmentParams& p_;
  const int64_t n_;
  const RowStore& store_;
  const RowKernels& kernels_;
  int flags_;
  bool mixed_, recolored_;
  Layer layer_[2];
  ColorTables colors_;
  std::vector<int> column_x_[2], column_y_[2], edges_x_[2], edges_y_[2], cuts_;
  std::vector<uint32_t> row_, second_row_;
};

}  // namespace torch_fastdet::core
