// Compute bilinear cv2.warpAffine and cv2.warpPerspective of 8-bit images with a constant border. kFixed is bitwise
// identical to OpenCV 4: coordinates in 1/32 pixel. kFloat is OpenCV 5's float32 arithmetic: its own vector and scalar
// code differ by one level here and there, and so does this code.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/common/exact_math.h"
#include "core/common/host_device.h"

namespace torch_fastdet::core {

enum class WarpKind : int32_t { kNone, kAffine, kPerspective };
enum class WarpArithmetic : int32_t { kFixed, kFloat };

constexpr int kWarpBits = 5;  // bits of a coordinate's fraction
constexpr int kWarpScale = 1 << kWarpBits;
constexpr int kWarpFraction = kWarpScale - 1;

// Round to nearest, ties to even. Values outside of int32 become the nearest int32.
TORCH_FASTDET_HOST_DEVICE int round_to_int(double x) {
#ifdef __CUDA_ARCH__
  return __double2int_rn(x);
#else
  // Adding 1.5 * 2^52 rounds to an integer. std::lrint is a call, which prevents vectorization of loops.
  x = x == x ? x : 0.;
  x = x > -2147483648. ? x : -2147483648.;
  x = x < 2147483647. ? x : 2147483647.;
  return static_cast<int>((x + 6755399441055744.) - 6755399441055744.);
#endif
}

// Map output to source pixels, row-major 3 x 3 (for an affine map the last row is not read).
struct InverseMap {
  double m[9];
};

TORCH_FASTDET_HOST_DEVICE InverseMap invert_affine(const double* m) {
  double d = sub_rn(mul_rn(m[0], m[4]), mul_rn(m[1], m[3]));
  d = d != 0 ? div_rn(1., d) : 0;
  InverseMap inverse{};
  double* i = inverse.m;
  i[0] = mul_rn(m[4], d);
  i[1] = mul_rn(m[1], -d);
  i[3] = mul_rn(m[3], -d);
  i[4] = mul_rn(m[0], d);
  i[2] = sub_rn(mul_rn(-i[0], m[2]), mul_rn(i[1], m[5]));
  i[5] = sub_rn(mul_rn(-i[3], m[2]), mul_rn(i[4], m[5]));
  return inverse;
}

TORCH_FASTDET_HOST_DEVICE double minor_of(const double* m, int a, int b, int c, int d) {
  return sub_rn(mul_rn(m[a], m[b]), mul_rn(m[c], m[d]));
}

// Return zeros for a matrix without an inverse.
TORCH_FASTDET_HOST_DEVICE InverseMap invert_perspective(const double* m) {
  double d = add_rn(sub_rn(mul_rn(m[0], minor_of(m, 4, 8, 5, 7)), mul_rn(m[1], minor_of(m, 3, 8, 5, 6))),
                    mul_rn(m[2], minor_of(m, 3, 7, 4, 6)));
  d = d != 0 ? div_rn(1., d) : 0;
  return {{mul_rn(minor_of(m, 4, 8, 5, 7), d), mul_rn(minor_of(m, 2, 7, 1, 8), d), mul_rn(minor_of(m, 1, 5, 2, 4), d),
           mul_rn(minor_of(m, 5, 6, 3, 8), d), mul_rn(minor_of(m, 0, 8, 2, 6), d), mul_rn(minor_of(m, 2, 3, 0, 5), d),
           mul_rn(minor_of(m, 3, 7, 4, 6), d), mul_rn(minor_of(m, 1, 6, 0, 7), d), mul_rn(minor_of(m, 0, 4, 1, 3), d)}};
}

// Return what a column and a row add to a coordinate of a fixed-point affine map, in 1/1024 pixel.
TORCH_FASTDET_HOST_DEVICE int affine_column(double factor, int x) {
  return round_to_int(mul_rn(mul_rn(factor, static_cast<double>(x)), 1024.));
}
TORCH_FASTDET_HOST_DEVICE int affine_row(double factor, double offset, int y) {
  return round_to_int(mul_rn(add_rn(mul_rn(factor, static_cast<double>(y)), offset), 1024.)) + 16;
}
// Return the coordinate in 1/32 pixel.
TORCH_FASTDET_HOST_DEVICE int affine_coordinate(int column, int row) {
  return static_cast<int>(static_cast<uint32_t>(column) + static_cast<uint32_t>(row)) >> 5;
}

struct WarpPoint {
  int x, y;  // in 1/32 pixel
};

// OpenCV processes an output in blocks of columns, and adds what a block's first column and the rest contribute.
TORCH_FASTDET_HOST_DEVICE int perspective_block(int width, int height) {
  const int block = 1024 / (height < 16 ? height : 16);
  return block < width ? block : width;
}

TORCH_FASTDET_HOST_DEVICE WarpPoint perspective_point(const InverseMap& map, int x, int y, int block) {
  const double* m = map.m;
  const double first = static_cast<double>(x - x % block), rest = static_cast<double>(x % block);
  const double row = static_cast<double>(y);
  const double x0 = add_rn(add_rn(mul_rn(m[0], first), mul_rn(m[1], row)), m[2]);
  const double y0 = add_rn(add_rn(mul_rn(m[3], first), mul_rn(m[4], row)), m[5]);
  const double w0 = add_rn(add_rn(mul_rn(m[6], first), mul_rn(m[7], row)), m[8]);
  double w = add_rn(w0, mul_rn(m[6], rest));
  w = w != 0 ? div_rn(static_cast<double>(kWarpScale), w) : 0;
  return {round_to_int(mul_rn(add_rn(x0, mul_rn(m[0], rest)), w)),
          round_to_int(mul_rn(add_rn(y0, mul_rn(m[3], rest)), w))};
}

// Blend one channel of four pixels, left to right and top to bottom, with fractions fx and fy of 1/32.
TORCH_FASTDET_HOST_DEVICE int blend_fixed(int p00, int p01, int p10, int p11, int fx, int fy) {
  const int top = p00 * kWarpScale + (p01 - p00) * fx;
  const int bottom = p10 * kWarpScale + (p11 - p10) * fx;
  return (top * kWarpScale + (bottom - top) * fy + 512) >> 10;
}

// OpenCV 5 gives the source pixel in float32.
struct FloatPoint {
  float x, y;
};

TORCH_FASTDET_HOST_DEVICE float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#elif defined(__GNUC__)
  return __builtin_fmaf(a, b, c);  // one instruction if the calling function is compiled for FMA
#else
  return std::fma(a, b, c);
#endif
}

// Compute a row's points. Everything that does not depend on the column is computed once.
struct FloatLine {
  float step[3], row[3];
  bool perspective;
  TORCH_FASTDET_HOST_DEVICE FloatPoint at(int x) const {
    const float column = static_cast<float>(x);
    const float px = fused(step[0], column, row[0]), py = fused(step[1], column, row[1]);
    if (!perspective) return {px, py};
    const float w = fused(step[2], column, row[2]);
    return {div_rn(px, w), div_rn(py, w)};
  }
};

TORCH_FASTDET_HOST_DEVICE FloatLine float_line(const InverseMap& map, WarpKind kind, int y) {
  FloatLine line;
  for (int i = 0; i < 3; ++i) {
    const double* m = map.m + 3 * i;
    line.step[i] = static_cast<float>(m[0]);
    line.row[i] = fused(static_cast<float>(m[1]), static_cast<float>(y), static_cast<float>(m[2]));
  }
  line.perspective = kind == WarpKind::kPerspective;
  return line;
}

// Return the whole pixel that a coordinate lies in. Far outside and for NaN, it is one that no canvas has.
TORCH_FASTDET_HOST_DEVICE int float_pixel(float coordinate) {
  if (!(coordinate > -2.f)) return -2;
  return coordinate < 32768.f ? static_cast<int>(::floorf(coordinate)) : 32768;
}

TORCH_FASTDET_HOST_DEVICE int blend_float(int p00, int p01, int p10, int p11, float fx, float fy) {
  const float top = fused(fx, static_cast<float>(p01 - p00), static_cast<float>(p00));
  const float bottom = fused(fx, static_cast<float>(p11 - p10), static_cast<float>(p10));
  const float value = fused(fy, sub_rn(bottom, top), top);
#ifdef __CUDA_ARCH__
  return __float2int_rn(value);
#else
  // As in round_to_int(), adding 1.5 * 2^23 rounds.
  return static_cast<int>((value + 12582912.f) - 12582912.f);
#endif
}

// Mix images as numpy does: (a * r + b * (1 - r)).astype(uint8). A share outside of 0 to 1, or NaN, gives a level too.
TORCH_FASTDET_HOST_DEVICE int mix(int a, int b, double r, double rest) {
  const double level = add_rn(mul_rn(static_cast<double>(a), r), mul_rn(static_cast<double>(b), rest));
  return static_cast<int>(level > 0. ? (level < 255. ? level : 255.) : 0.);
}

}  // namespace torch_fastdet::core
