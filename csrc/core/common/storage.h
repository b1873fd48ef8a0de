// Conversion between a stored type and its arithmetic type. The general form serves float, double and Torch's CPU half
// types; CUDA's half types are specialised where they are known.
#pragma once

#include <type_traits>

#include "core/common/host_device.h"

namespace torch_fastdet::core {

template <typename T>
struct Storage {
  using arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;
  static TORCH_FASTDET_HOST_DEVICE arithmetic load(T x) { return static_cast<arithmetic>(x); }
  static TORCH_FASTDET_HOST_DEVICE T store(arithmetic x) { return static_cast<T>(x); }
  // x as it would come back from memory.
  static TORCH_FASTDET_HOST_DEVICE arithmetic round(arithmetic x) { return load(store(x)); }
};

}  // namespace torch_fastdet::core
