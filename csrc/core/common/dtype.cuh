// Define the device types of DType: their Storage, their dispatch, and elements whose type is known only at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/common/dtype.h"
#include "core/common/storage.h"

namespace torch_fastdet::core {

template <>
struct Storage<__half> {
  using arithmetic = float;
  static TORCH_FASTDET_HOST_DEVICE float load(__half x) { return __half2float(x); }
  static TORCH_FASTDET_HOST_DEVICE __half store(float x) { return __float2half_rn(x); }
  static TORCH_FASTDET_HOST_DEVICE float round(float x) { return load(store(x)); }
};

template <>
struct Storage<__nv_bfloat16> {
  using arithmetic = float;
  static TORCH_FASTDET_HOST_DEVICE float load(__nv_bfloat16 x) { return __bfloat162float(x); }
  static TORCH_FASTDET_HOST_DEVICE __nv_bfloat16 store(float x) { return __float2bfloat16_rn(x); }
  static TORCH_FASTDET_HOST_DEVICE float round(float x) { return load(store(x)); }
};

// Call f with a zero of the device type that `dtype` names. f is compiled for the caller's side, host or device.
#pragma nv_exec_check_disable
template <typename F>
TORCH_FASTDET_HOST_DEVICE auto dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(__half{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat64:
      break;
  }
  return f(double{});
}

// Return element i of `data`, whose type is `dtype`, as an A.
template <typename A>
__device__ __forceinline__ A load_element(const void* data, DType dtype, int64_t i) {
  return dispatch(
      dtype, [&](auto zero) { return static_cast<A>(to_arithmetic(static_cast<const decltype(zero)*>(data)[i])); });
}

template <typename A>
__device__ __forceinline__ void store_element(void* data, DType dtype, int64_t i, A value) {
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(data)[i] = from_arithmetic<T>(static_cast<arithmetic_t<T>>(value));
  });
}

}  // namespace torch_fastdet::core
