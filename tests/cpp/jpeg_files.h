// Make JPEG files of random coefficients, in any layout, with their pixels, which nested loops compute from the
// coefficients without any entropy coding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "core/jpeg/jpeg_file.h"
#include "core/jpeg/jpeg_math.h"

namespace torch_fastdet::core {

inline void at_once(const std::function<void()>& task) {
  task();
}

class RandomJpeg {
 public:
  struct Sampling {
    int h, v;
  };

  int width, height, components, orientation = 1, interval = 0;
  bool rgb = false, damaged_values = false;
  std::vector<Sampling> sampling;
  std::vector<uint8_t> bytes;
  std::vector<uint8_t> pixels;  // B G R, as shown
  int shown_width = 0, shown_height = 0;

  explicit RandomJpeg(uint64_t seed, int most = 70) : random_(seed) {
    width = 1 + below(most), height = 1 + below(most);
    components = below(6) ? 3 : 1;
    static const std::vector<std::vector<Sampling>> kLayouts = {
        {{2, 2}, {1, 1}, {1, 1}}, {{1, 1}, {1, 1}, {1, 1}}, {{2, 1}, {1, 1}, {1, 1}}, {{1, 2}, {1, 1}, {1, 1}},
        {{4, 1}, {1, 1}, {1, 1}}, {{3, 1}, {1, 1}, {1, 1}}, {{1, 4}, {1, 1}, {1, 1}}, {{1, 3}, {1, 1}, {1, 1}},
        {{4, 2}, {1, 1}, {1, 1}}, {{2, 2}, {2, 1}, {1, 2}}, {{1, 1}, {2, 2}, {2, 2}}, {{2, 2}, {1, 2}, {2, 1}}};
    sampling = components == 1 ? std::vector<Sampling>{{1 + below(3), 1 + below(3)}}
                               : kLayouts[below(3) ? static_cast<size_t>(below(3)) : static_cast<size_t>(below(12))];
    orientation = below(3) ? 1 : 1 + below(8);
    interval = below(2) ? 0 : 1 + below(12);
    rgb = components == 3 && below(8) == 0;
    wide_ = below(5) == 0;
    damaged_values = below(8) == 0;
    if (below(4) == 0) {  // as most files are: the kernels have a path of their own for them
      width = (width + 15) / 16 * 16, components = 3, sampling = kLayouts[0], orientation = 1, rgb = false;
    }
    write();
  }

  int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }

 private:
  void put(std::initializer_list<int> values) {
    for (const int value : values) bytes.push_back(static_cast<uint8_t>(value));
  }
  void put16(int value) { put({value >> 8, value & 255}); }

  void put_bits(uint32_t value, int count) {
    for (int i = count - 1; i >= 0; --i) {
      byte_ = static_cast<uint8_t>(byte_ << 1 | (value >> i & 1));
      if (++bits_ == 8) flush_byte();
    }
  }
  void flush_byte() {
    bytes.push_back(byte_);
    if (byte_ == 0xff) bytes.push_back(0);
    byte_ = 0, bits_ = 0;
  }
  void pad() {
    while (bits_) put_bits(1, 1);
  }
  void put_symbol(const JpegHuffman& table, int symbol) {
    uint32_t code = 0;
    int row = 0;
    for (int length = 1; length <= 16; ++length, code <<= 1) {
      for (int i = 0; i < table.counts[length - 1]; ++i, ++code, ++row) {
        if (table.symbols[row] == symbol) return put_bits(code, length);
      }
    }
  }
  static int size_of(int value) {
    int size = 0;
    for (value = std::abs(value); value; value >>= 1) ++size;
    return size;
  }
  void put_value(int value, int size) {
    put_bits(static_cast<uint32_t>(value < 0 ? value + (1 << size) - 1 : value), size);
  }

  void put_block(const int (&block)[kJpegBlock], int difference, const JpegHuffman& dc, const JpegHuffman& ac) {
    put_symbol(dc, size_of(difference));
    put_value(difference, size_of(difference));
    int run = 0;
    for (int i = 1; i < kJpegBlock; ++i) {
      if (!block[i]) {
        ++run;
        continue;
      }
      for (; run > 15; run -= 16) put_symbol(ac, 0xf0);
      put_symbol(ac, run << 4 | size_of(block[i]));
      put_value(block[i], size_of(block[i]));
      run = 0;
    }
    if (run) put_symbol(ac, 0);
  }

  void write() {
    JpegFile standard;
    define_standard_tables(standard);
    put({0xff, 0xd8});
    if (!rgb) put({0xff, 0xe0, 0, 16, 'J', 'F', 'I', 'F', 0, 1, 1, 0, 0, 1, 0, 1, 0, 0});
    if (orientation > 1 || below(4) == 0) {
      put({0xff, 0xe1, 0, 34,   'E', 'x', 'i', 'f', 0, 0, 'M', 'M',         0, 42, 0, 0, 0, 8,
           0,    1,    1, 0x12, 0,   3,   0,   0,   0, 1, 0,   orientation, 0, 0,  0, 0, 0, 0});
    }
    uint16_t quantizers[2][kJpegBlock];
    for (auto& table : quantizers) {
      for (uint16_t& q : table) q = static_cast<uint16_t>(1 + below(wide_ ? 2000 : damaged_values ? 255 : 20));
    }
    for (int i = 0; i < 2; ++i) {
      put({0xff, 0xdb, 0, wide_ ? 131 : 67, (wide_ ? 16 : 0) | i});
      for (const uint16_t q : quantizers[i]) wide_ ? put16(q) : put({q});
    }
    put({0xff, wide_ ? 0xc1 : 0xc0, 0, 8 + 3 * components, 8});
    put16(height), put16(width), put({components});
    for (int i = 0; i < components; ++i) {
      put({rgb ? "RGB"[i] : i + 1, sampling[i].h << 4 | sampling[i].v, i > 0});
    }
    if (below(4)) {
      for (int i = 0; i < 4; ++i) {
        const JpegHuffman& table = i < 2 ? standard.dc[i % 2] : standard.ac[i % 2];
        put({0xff, 0xc4, 0, 19 + table.codes(), i < 2 ? i : 0x10 | i % 2});
        bytes.insert(bytes.end(), table.counts, table.counts + 16);
        bytes.insert(bytes.end(), table.symbols, table.symbols + table.codes());
      }
    }
    if (interval) put({0xff, 0xdd, 0, 4, interval >> 8, interval & 255});
    put({0xff, 0xda, 0, 6 + 2 * components, components});
    for (int i = 0; i < components; ++i) put({rgb ? "RGB"[i] : i + 1, i ? 0x11 : 0});
    put({0, 63, 0});

    std::vector<Sampling> s = sampling;
    if (components == 1) s = {{1, 1}};
    int h = 1, v = 1;
    for (const Sampling& each : s) h = std::max(h, each.h), v = std::max(v, each.v);
    const int columns = (width + 8 * h - 1) / (8 * h), rows = (height + 8 * v - 1) / (8 * v);
    std::vector<std::vector<int>> planes;
    for (const Sampling& each : s) planes.emplace_back(static_cast<size_t>(columns * each.h * 8 * rows * each.v * 8));
    int predictors[3] = {0, 0, 0};
    for (int mcu = 0; mcu < columns * rows; ++mcu) {
      if (interval && mcu && mcu % interval == 0) {
        pad();
        put({0xff, 0xd0 + (mcu / interval - 1) % 8});
        predictors[0] = predictors[1] = predictors[2] = 0;
      }
      for (int i = 0; i < components; ++i) {
        for (int b = 0; b < s[i].h * s[i].v; ++b) {
          int block[kJpegBlock] = {std::clamp(predictors[i] + below(401) - 200, -1000, 1000)};
          const int count = below(4) ? below(8) : below(64), reach = below(4) ? 12 : 64;
          for (int j = 0; j < count; ++j) {
            block[1 + below(reach - 1)] = damaged_values ? below(2047) - 1023 : below(41) - 20;
          }
          put_block(block, block[0] - predictors[i], standard.dc[i > 0], standard.ac[i > 0]);
          predictors[i] = block[0];
          const int pitch = columns * s[i].h * 8;
          const int x = (mcu % columns * s[i].h + b % s[i].h) * 8, y = (mcu / columns * s[i].v + b / s[i].h) * 8;
          put_samples(block, quantizers[i > 0], planes[i].data() + y * pitch + x, pitch);
        }
      }
    }
    pad();
    if (below(4) == 0) put({7, 0xff, 0, 0xff, 0xff});  // junk and fill bytes
    put({0xff, 0xd9});
    if (below(4) == 0) put({1, 2, 3, 0xff, 0xd8});
    make_pixels(s, h, v, planes);
  }

  static void put_samples(const int (&block)[kJpegBlock], const uint16_t (&quantizers)[kJpegBlock], int* out,
                          int pitch) {
    int a[kJpegBlock];
    bool flat = true;
    for (int i = 0; i < kJpegBlock; ++i) {
      a[jpeg_natural(i)] = jpeg_dequantize(block[i], quantizers[i]);
      flat = flat && (jpeg_natural(i) < 8 || a[jpeg_natural(i)] == 0);
    }
    for (int i = 0; i < 8; ++i) {
      if (flat) {
        for (int j = 7; j >= 0; --j) a[8 * j + i] = jpeg_idct_flat_column(a[i]);
      } else {
        jpeg_idct8<11>(a[i], a[8 + i], a[16 + i], a[24 + i], a[32 + i], a[40 + i], a[48 + i], a[56 + i]);
      }
    }
    for (int i = 0; i < 8; ++i) {
      int* x = a + 8 * i;
      jpeg_idct8<18>(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]);
      for (int j = 0; j < 8; ++j) out[i * pitch + j] = std::clamp(x[j] + 128, 0, 255);
    }
  }

  // Return the sample of component i for a pixel by the definition of triangle filters and boxes.
  static int sample(const std::vector<int>& plane, int pitch, int w, int h, int ratio_x, int ratio_y, int x, int y) {
    const int sx = x / ratio_x, sy = y / ratio_y;
    const auto at = [&](int column, int row) {
      return plane[static_cast<size_t>(std::clamp(row, 0, h - 1) * pitch + std::clamp(column, 0, w - 1))];
    };
    const int nx = x % 2 ? sx + 1 : sx - 1, ny = y % 2 ? sy + 1 : sy - 1;
    if (ratio_x == 2 && ratio_y == 1 && w > 2) return (3 * at(sx, sy) + at(nx, sy) + 1 + x % 2) >> 2;
    if (ratio_x == 1 && ratio_y == 2) return (3 * at(sx, sy) + at(sx, ny) + 1 + y % 2) >> 2;
    if (ratio_x == 2 && ratio_y == 2 && w > 2) {
      const int mine = 3 * at(sx, sy) + at(sx, ny), next = 3 * at(nx, sy) + at(nx, ny);
      return (3 * mine + next + 8 - x % 2) >> 4;
    }
    return at(sx, sy);
  }

  void make_pixels(const std::vector<Sampling>& s, int h, int v, const std::vector<std::vector<int>>& planes) {
    const bool swaps = orientation >= 5;
    shown_width = swaps ? height : width, shown_height = swaps ? width : height;
    pixels.resize(static_cast<size_t>(shown_width) * shown_height * 3);
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) {
        int c[3] = {0, 0, 0};
        for (int i = 0; i < components; ++i) {
          const int w = (width * s[i].h + h - 1) / h, plane_height = (height * s[i].v + v - 1) / v;
          const int pitch = (width + 8 * h - 1) / (8 * h) * s[i].h * 8;
          c[i] = sample(planes[i], pitch, w, plane_height, h / s[i].h, v / s[i].v, x, y);
        }
        int pixel[3] = {c[0], c[0], c[0]};
        if (components == 3) jpeg_ycc_to_bgr(c[0], c[1], c[2], pixel[0], pixel[1], pixel[2]);
        if (rgb) pixel[0] = c[2], pixel[1] = c[1], pixel[2] = c[0];
        const int right = width - 1 - x, below = height - 1 - y;
        const int places[9][2] = {{x, y}, {x, y},     {right, y},     {right, below}, {x, below},
                                  {y, x}, {below, x}, {below, right}, {y, right}};
        uint8_t* out = pixels.data() + (places[orientation][1] * shown_width + places[orientation][0]) * 3;
        for (int i = 0; i < 3; ++i) out[i] = static_cast<uint8_t>(std::clamp(pixel[i], 0, 255));
      }
    }
  }

  std::mt19937_64 random_;
  bool wide_ = false;
  uint8_t byte_ = 0;
  int bits_ = 0;
};

}  // namespace torch_fastdet::core
