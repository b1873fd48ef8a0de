// Convert 8-bit images between BGR and HSV with OpenCV's bits (checked for all 2^24 colors). Hue is in half degrees.
#pragma once

#include "core/common/exact_math.h"
#include "core/common/host_device.h"

namespace torch_fastdet::core {

struct Hsv {
  int h, s, v;
};

struct Bgr {
  int b, g, r;
};

// Return a * b + c, rounded once (or twice, in float64: the same for every product of colors, as tests show).
TORCH_FASTDET_HOST_DEVICE float fma_rn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#elif defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return static_cast<float>(static_cast<double>(a) * b + c);
#endif
}

// Return 4096 * 255 / v and 4096 * 30 / d, rounded to nearest, as in OpenCV's division tables.
TORCH_FASTDET_HOST_DEVICE int saturation_factor(int v) {
  return v == 0 ? 0 : static_cast<int>(div_rn(1044480.f, static_cast<float>(v)) + 0.5f);
}
TORCH_FASTDET_HOST_DEVICE int hue_factor(int d) {
  return d == 0 ? 0 : static_cast<int>(div_rn(122880.f, static_cast<float>(d)) + 0.5f);
}

// The factors are saturation_factor(max) and hue_factor(max - min).
TORCH_FASTDET_HOST_DEVICE Hsv hsv_from_bgr(int b, int g, int r, int v, int d, int s_factor, int h_factor) {
  int h = v == r ? g - b : v == g ? b - r + 2 * d : r - g + 4 * d;
  h = (h * h_factor + 2048) >> 12;
  return {h < 0 ? h + 180 : h, (d * s_factor + 2048) >> 12, v};
}

// Hold the place of a hue within its sector of 60 degrees, and the sector.
struct HuePlace {
  float place;
  int sector;
};

TORCH_FASTDET_HOST_DEVICE HuePlace hue_place(int h) {
  const float scaled = mul_rn(static_cast<float>(h), 6.f / 180.f);
  const int sector = static_cast<int>(scaled);
  return {sub_rn(scaled, static_cast<float>(sector)), sector >= 6 ? sector - 6 : sector};
}

TORCH_FASTDET_HOST_DEVICE float unit(int value) {
  return mul_rn(static_cast<float>(value), 1.f / 255.f);
}

// OpenCV's vector code drops the fraction. Its scalar code, which processes the remaining columns of a row, rounds.
TORCH_FASTDET_HOST_DEVICE int level(float x, bool round) {
  const float scaled = mul_rn(x, 255.f);
#ifdef __CUDA_ARCH__
  return round ? __float2int_rn(scaled) : __float2int_rz(scaled);
#else
  // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
  return static_cast<int>(round ? (scaled + 12582912.f) - 12582912.f : scaled);
#endif
}

// s and v are in units of 1 (see unit()).
TORCH_FASTDET_HOST_DEVICE Bgr bgr_from_hsv(HuePlace hue, float s, float v, bool round) {
  const float low = mul_rn(v, sub_rn(1.f, s));
  const bool odd = hue.sector & 1;  // falls along odd sectors, rises along even ones
  const float slope = odd ? hue.place : sub_rn(1.f, hue.place);
  const int top = level(v, round), bottom = level(low, round);
  const int middle = level(mul_rn(v, fma_rn(-s, slope, 1.f)), round);
  // By sector, the highest channel is r, g, g, b, b, r, and the lowest one is b, b, r, r, g, g.
  const int pair = hue.sector >> 1;
  const int b = pair == 0 ? bottom : pair == 1 ? (odd ? top : middle) : (odd ? middle : top);
  const int g = pair == 0 ? (odd ? top : middle) : pair == 1 ? (odd ? middle : top) : bottom;
  const int r = pair == 0 ? (odd ? middle : top) : pair == 1 ? bottom : (odd ? top : middle);
  return {b, g, r};
}

}  // namespace torch_fastdet::core
