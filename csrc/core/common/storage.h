// Map a stored type T to its arithmetic type, float or double. dtype.cuh specialises this for CUDA's half types.
#pragma once

#include <type_traits>

#include "core/common/host_device.h"

namespace torch_fastdet::core {

template <typename T>
struct Storage {
  using arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;
  static TORCH_FASTDET_HOST_DEVICE arithmetic load(T x) { return static_cast<arithmetic>(x); }
  static TORCH_FASTDET_HOST_DEVICE T store(arithmetic x) { return static_cast<T>(x); }
  // Return x as it would be after storing and loading it.
  static TORCH_FASTDET_HOST_DEVICE arithmetic round(arithmetic x) { return load(store(x)); }
};

template <typename T>
using arithmetic_t = typename Storage<T>::arithmetic;

template <typename T>
TORCH_FASTDET_HOST_DEVICE arithmetic_t<T> to_arithmetic(T x) {
  return Storage<T>::load(x);
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE T from_arithmetic(arithmetic_t<T> x) {
  return Storage<T>::store(x);
}

}  // namespace torch_fastdet::core
