// Compute one pixel of an augmented image: the bilinear sample of a warped canvas, and the three color tables.
#pragma once

#include <cstdint>

#include "core/image/color_math.h"
#include "core/image/image_tables.h"

namespace torch_fastdet::core {

template <int kChannels>
struct Pixel {
  int v[kChannels];
};

template <int kChannels>
TORCH_FASTDET_HOST_DEVICE Pixel<kChannels> border_pixel() {
  Pixel<kChannels> pixel;
  for (int c = 0; c < kChannels; ++c) pixel.v[c] = kBorder;
  return pixel;
}

template <int kChannels>
TORCH_FASTDET_HOST_DEVICE Pixel<kChannels> load_pixel(const uint8_t* at) {
  if (!at) return border_pixel<kChannels>();
  Pixel<kChannels> pixel;
  for (int c = 0; c < kChannels; ++c) pixel.v[c] = at[c];
  return pixel;
}

template <int kChannels>
struct PixelPair {
  Pixel<kChannels> left, right;
};

template <int kChannels>
TORCH_FASTDET_HOST_DEVICE PixelPair<kChannels> load_pair(const uint8_t* at) {
  PixelPair<kChannels> pair;
#ifdef __CUDA_ARCH__
  // Load the whole words that hold at least one byte of the two pixels: a third of the loads that bytes would take.
  constexpr int kBytes = 2 * kChannels;
  const uintptr_t address = reinterpret_cast<uintptr_t>(at);
  const int skip = static_cast<int>(address & 3);
  const auto* words = reinterpret_cast<const uint32_t*>(address - skip);
  const uint32_t first = __ldg(words);
  const uint32_t second = skip + kBytes > 4 ? __ldg(words + 1) : 0;
  const uint32_t low = __funnelshift_r(first, second, skip * 8);
  uint32_t high = 0;
  if (kBytes > 4) high = __funnelshift_r(second, skip + kBytes > 8 ? __ldg(words + 2) : 0, skip * 8);
  for (int i = 0; i < kBytes; ++i) {
    const int value = static_cast<int>((i < 4 ? low >> (8 * i) : high >> (8 * (i - 4))) & 255);
    (i < kChannels ? pair.left.v[i] : pair.right.v[i - kChannels]) = value;
  }
#else
  pair.left = load_pixel<kChannels>(at);
  pair.right = load_pixel<kChannels>(at + kChannels);
#endif
  return pair;
}

// Hold the square of the canvas whose upper left pixel is (x, y), as two pairs.
template <int kChannels>
struct PixelSquare {
  PixelPair<kChannels> top, bottom;
};

// Return whether any image covers part of the square. If none does, the square is not filled in.
template <int kChannels>
TORCH_FASTDET_HOST_DEVICE bool load_square(const Layer& layer, int x, int y, PixelSquare<kChannels>& square) {
  const int i = patch_of_square(layer, x, y);
  if (i == -1) return false;
  if (i >= 0) {
    const Patch& patch = layer.patch[i];
    const uint8_t* at = patch.at(x, y, kChannels);
    square = {load_pair<kChannels>(at), load_pair<kChannels>(at + patch.pitch)};
    return true;
  }
  const auto pixel = [&](int px, int py) { return load_pixel<kChannels>(canvas_pixel(layer, px, py, kChannels)); };
  square = {{pixel(x, y), pixel(x + 1, y)}, {pixel(x, y + 1), pixel(x + 1, y + 1)}};
  return true;
}

// Sample at a point in 1/32 pixel. OpenCV saturates whole pixels to 16 bits, which affects none within a canvas.
template <int kChannels>
TORCH_FASTDET_HOST_DEVICE Pixel<kChannels> sample_fixed(const Layer& layer, WarpPoint point) {
  PixelSquare<kChannels> s;
  if (!load_square(layer, point.x >> kWarpBits, point.y >> kWarpBits, s)) return border_pixel<kChannels>();
  const int fx = point.x & kWarpFraction, fy = point.y & kWarpFraction;
  Pixel<kChannels> pixel;
  for (int c = 0; c < kChannels; ++c) {
    pixel.v[c] = blend_fixed(s.top.left.v[c], s.top.right.v[c], s.bottom.left.v[c], s.bottom.right.v[c], fx, fy);
  }
  return pixel;
}

template <int kChannels>
TORCH_FASTDET_HOST_DEVICE Pixel<kChannels> sample_float(const Layer& layer, FloatPoint point) {
  const int x = float_pixel(point.x), y = float_pixel(point.y);
  PixelSquare<kChannels> s;
  if (x < -1 || y < -1 || x > kMaxCanvas || y > kMaxCanvas || !load_square(layer, x, y, s)) {
    return border_pixel<kChannels>();
  }
  const float fx = sub_rn(point.x, static_cast<float>(x)), fy = sub_rn(point.y, static_cast<float>(y));
  Pixel<kChannels> pixel;
  for (int c = 0; c < kChannels; ++c) {
    pixel.v[c] = blend_float(s.top.left.v[c], s.top.right.v[c], s.bottom.left.v[c], s.bottom.right.v[c], fx, fy);
  }
  return pixel;
}

// Hold OpenCV's division tables, and an image's own three with what bgr_from_hsv() makes of their values.
struct ColorTables {
  int s_factor[256], h_factor[256];
  float saturation[256], value[256];
  int hue[256];
};

// Fill in entry i, given the image's tables of hue, saturation and value.
TORCH_FASTDET_HOST_DEVICE void fill_color_tables(ColorTables& t, const uint8_t* tables, int i) {
  t.s_factor[i] = saturation_factor(i);
  t.h_factor[i] = hue_factor(i);
  t.hue[i] = tables[i];
  t.saturation[i] = unit(tables[256 + i]);
  t.value[i] = unit(tables[512 + i]);
}

TORCH_FASTDET_HOST_DEVICE Pixel<3> recolor(const ColorTables& t, const Pixel<3>& pixel, bool round) {
  const int b = pixel.v[0], g = pixel.v[1], r = pixel.v[2];
  const int most = b > g ? (b > r ? b : r) : (g > r ? g : r);
  const int least = b < g ? (b < r ? b : r) : (g < r ? g : r);
  const int d = most - least;
  const Hsv hsv = hsv_from_bgr(b, g, r, most, d, t.s_factor[most], t.h_factor[d]);
  const Bgr bgr = bgr_from_hsv(hue_place(t.hue[hsv.h]), t.saturation[hsv.s], t.value[hsv.v], round);
  return {{bgr.b, bgr.g, bgr.r}};
}

TORCH_FASTDET_HOST_DEVICE Pixel<1> recolor(const ColorTables&, const Pixel<1>& pixel, bool) {
  return pixel;
}

}  // namespace torch_fastdet::core
