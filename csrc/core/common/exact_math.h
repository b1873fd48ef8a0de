// Compute the same bits on CPU and GPU: products are not contracted, and exp uses only IEEE additions and products.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/common/host_device.h"

namespace torch_fastdet::core {

TORCH_FASTDET_HOST_DEVICE float add_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

TORCH_FASTDET_HOST_DEVICE double add_rn(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

TORCH_FASTDET_HOST_DEVICE float sub_rn(float a, float b) {
  return add_rn(a, -b);
}

TORCH_FASTDET_HOST_DEVICE double sub_rn(double a, double b) {
  return add_rn(a, -b);
}

TORCH_FASTDET_HOST_DEVICE float mul_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

TORCH_FASTDET_HOST_DEVICE double mul_rn(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

TORCH_FASTDET_HOST_DEVICE float div_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

TORCH_FASTDET_HOST_DEVICE double div_rn(double a, double b) {
#ifdef __CUDA_ARCH__
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

TORCH_FASTDET_HOST_DEVICE float sqrt_rn(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

TORCH_FASTDET_HOST_DEVICE double sqrt_rn(double x) {
#ifdef __CUDA_ARCH__
  return __dsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

TORCH_FASTDET_HOST_DEVICE uint32_t float_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

TORCH_FASTDET_HOST_DEVICE float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

TORCH_FASTDET_HOST_DEVICE float reciprocal_rn(float x) {
#ifdef __CUDA_ARCH__
  return __frcp_rn(x);
#else
  return 1.f / x;
#endif
}

TORCH_FASTDET_HOST_DEVICE double reciprocal_rn(double x) {
  return div_rn(1., x);
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE bool is_finite(A x) {
  return x - x == A(0);
}

// Return exp(x) within 2 ulp up to 88.7, infinity above, 0 below -86.9, by Cody and Waite's reduction and Cephes'
// polynomial.
TORCH_FASTDET_HOST_DEVICE float exp_rn(float x) {
  const float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which is left in the low bits
  const float shifted = add_rn(mul_rn(x, 1.44269504088896341f), kRound);
  const float n = sub_rn(shifted, kRound);
  float r = sub_rn(x, mul_rn(n, 0.693359375f));
  r = sub_rn(r, mul_rn(n, -2.12194440e-4f));
  float p = 1.9875691500e-4f;
  p = add_rn(mul_rn(p, r), 1.3981999507e-3f);
  p = add_rn(mul_rn(p, r), 8.3334519073e-3f);
  p = add_rn(mul_rn(p, r), 4.1665795894e-2f);
  p = add_rn(mul_rn(p, r), 1.6666665459e-1f);
  p = add_rn(mul_rn(p, r), 5.0000001201e-1f);
  p = add_rn(add_rn(mul_rn(p, mul_rn(r, r)), r), 1.f);
  // Compute 2^n as 2 * 2^(n - 1), because n may be 128.
  const float scale = bits_float((float_bits(shifted) - float_bits(kRound) + 126u) << 23);
  const float y = mul_rn(mul_rn(p, scale), 2.f);
  return x < -86.9f ? 0.f : (x > 88.72f ? bits_float(0x7f800000u) : y);
}

TORCH_FASTDET_HOST_DEVICE double exp_rn(double x) {
#ifdef __CUDA_ARCH__
  return ::exp(x);
#else
  return std::exp(x);
#endif
}

// Return log(x) within 2 ulp for normal x, and NaN for NaN and below 1.2e-38. The polynomial is that of Cephes' logf.
TORCH_FASTDET_HOST_DEVICE float log_rn(float x) {
  const float infinity = bits_float(0x7f800000u);
  if (!(x >= 1.17549435e-38f && x < infinity)) return x == infinity ? x : bits_float(0x7fc00000u);
  const uint32_t kRootHalf = 0x3f3504f3u;  // x = 2^n (1 + f), and 1 + f lies between sqrt(1/2) and sqrt(2)
  const uint32_t shifted = float_bits(x) - kRootHalf;
  const float n = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  const float f = sub_rn(bits_float((shifted & 0x007fffffu) + kRootHalf), 1.f);
  const float square = mul_rn(f, f);
  float p = 7.0376836292e-2f;
  p = add_rn(mul_rn(p, f), -1.1514610310e-1f);
  p = add_rn(mul_rn(p, f), 1.1676998740e-1f);
  p = add_rn(mul_rn(p, f), -1.2420140846e-1f);
  p = add_rn(mul_rn(p, f), 1.4249322787e-1f);
  p = add_rn(mul_rn(p, f), -1.6668057665e-1f);
  p = add_rn(mul_rn(p, f), 2.0000714765e-1f);
  p = add_rn(mul_rn(p, f), -2.4999993993e-1f);
  p = add_rn(mul_rn(p, f), 3.3333331174e-1f);
  const float tail = add_rn(mul_rn(mul_rn(f, square), p), mul_rn(n, -2.12194440e-4f));
  return add_rn(add_rn(f, sub_rn(tail, mul_rn(square, 0.5f))), mul_rn(n, 0.693359375f));
}

TORCH_FASTDET_HOST_DEVICE double log_rn(double x) {
#ifdef __CUDA_ARCH__
  return ::log(x);
#else
  return std::log(x);
#endif
}

}  // namespace torch_fastdet::core
