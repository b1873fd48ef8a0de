// Include the headers and define the backends that every family's run.h needs.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <cstdint>

#include "ops/common/options.h"

namespace torch_fastdet {

// A family's Cpu and Cuda derive from this and add run(params, op).
struct OnDevice {
  static constexpr bool kMeta = false;
};

// This backend computes only shapes and dtypes, of sizes that may be symbolic; it runs nothing.
struct Meta {
  static constexpr bool kMeta = true;
};

// Place buffers of `bytes` bytes in one allocation of `size` bytes, each at a multiple of 256.
template <size_t kCount>
struct Places {
  std::array<int64_t, kCount> at{};
  int64_t size = 0;

  explicit Places(const std::array<int64_t, kCount>& bytes) {
    for (size_t i = 0; i < kCount; ++i) {
      at[i] = size;
      size += (bytes[i] + 255) / 256 * 256;
    }
  }
};

}  // namespace torch_fastdet
