// Compute log(1 + x) of a share, as entropies need it.
#pragma once

#include <cmath>

#include "core/common/host_device.h"

namespace torch_fastdet::core {

// Return log(1 + x) for 0 <= x <= 1, within 2 ulp in float. Cephes' polynomial is branch-free, so that loops vectorise.
TORCH_FASTDET_HOST_DEVICE float log1p_of_share(float x) {
  const bool upper = x > 0.41421356f;
  const float f = upper ? (x - 1.f) * 0.5f : x;  // 1 + x is 1 + f or 2 (1 + f)
  const float square = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const float halves = upper ? 1.f : 0.f;  // log 2 in two parts
  return f + (f * square * p - halves * 2.12194440e-4f - square * 0.5f) + halves * 0.693359375f;
}

TORCH_FASTDET_HOST_DEVICE double log1p_of_share(double x) {
#ifdef __CUDA_ARCH__
  return ::log1p(x);
#else
  return std::log1p(x);
#endif
}

}  // namespace torch_fastdet::core
