// Define the host's half-precision types for the tests: IEEE binary16 and bfloat16, rounded to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace torch_fastdet::core {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(x));
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

struct Float16 {
  uint16_t bits = 0;

  Float16() = default;
  explicit Float16(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000u, size = bits_of(x) & 0x7fffffffu;
    uint32_t rest;
    if (size > 0x7f800000u) {
      rest = 0x7fffu;  // NaN
    } else if (size >= 0x477ff000u) {
      rest = 0x7c00u;  // 65520 and above round to infinity
    } else if (size < 0x38800000u) {
      rest = bits_of(float_of(size) + 0.5f) - 0x3f000000u;  // subnormal: the last place of 0.5f is that of binary16
    } else {
      rest = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    }
    bits = static_cast<uint16_t>(sign | rest);
  }
  operator float() const {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
    if (exponent == 31) return float_of(sign | 0x7f800000u | fraction << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    const float size = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -size : size;
  }
};

struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float x)
      : bits(static_cast<uint16_t>(x != x ? 0x7fffu : (bits_of(x) + 0x7fffu + (bits_of(x) >> 16 & 1u)) >> 16)) {}
  operator float() const { return float_of(uint32_t{bits} << 16); }
};

// core/common/cpu_types.h needs this.
struct Halves {
  using Float16 = core::Float16;
  using BFloat16 = core::BFloat16;
};

}  // namespace torch_fastdet::core
