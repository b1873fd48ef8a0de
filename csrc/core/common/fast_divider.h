// Divide 32-bit indices by a number that the host knows: this takes a multiplication and a shift on the device.
#pragma once

#include <cstdint>

#include "core/common/host_device.h"

namespace torch_fastdet::core {

// It is exact below 2^31 (Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994).
struct FastDivider {
  uint32_t divisor = 1;
  uint32_t magic = 1;
  uint32_t shift = 0;

  FastDivider() = default;
  explicit FastDivider(uint32_t d) : divisor(d) {
    while ((uint64_t{1} << shift) < d) ++shift;
    magic = static_cast<uint32_t>((((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d) + 1);
  }

  // Set `n` to the quotient and return the remainder.
  TORCH_FASTDET_HOST_DEVICE uint32_t divide(uint32_t& n) const {
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(n, magic);
#else
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * magic) >> 32);
#endif
    const uint32_t quotient = (high + n) >> shift;
    const uint32_t remainder = n - quotient * divisor;
    n = quotient;
    return remainder;
  }
};

}  // namespace torch_fastdet::core
