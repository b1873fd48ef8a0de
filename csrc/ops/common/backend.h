// Headers and backends for every family's run.h.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <cstdint>

#include "ops/common/options.h"

namespace torch_fastdet {

// The base of a family's Cpu and Cuda, which add run(params, op).
struct OnDevice {
  static constexpr bool kMeta = false;
};

// The backend for shapes and dtypes only, of sizes that may be symbolic: nothing runs.
struct Meta {
  static constexpr bool kMeta = true;
};

// The places of buffers of `bytes` bytes in one allocation of `size` bytes, each at a multiple of 256.
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
