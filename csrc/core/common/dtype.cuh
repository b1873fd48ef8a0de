// Device types of DType, their arithmetic type (float, or double for double), and conversions between the two.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/common/dtype.h"

namespace torch_fastdet::core {

template <typename T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};
template <typename T>
using arithmetic_t = typename Arithmetic<T>::type;

__device__ __forceinline__ float to_arithmetic(__half x) {
  return __half2float(x);
}
__device__ __forceinline__ float to_arithmetic(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ __forceinline__ float to_arithmetic(float x) {
  return x;
}
__device__ __forceinline__ double to_arithmetic(double x) {
  return x;
}

template <typename T>
__device__ __forceinline__ T from_arithmetic(arithmetic_t<T> x) {
  return static_cast<T>(x);
}
template <>
__device__ __forceinline__ __half from_arithmetic<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_arithmetic<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Calls f with a value of the device type that `dtype` names: dispatch(dtype, [&](auto zero) { using T =
// decltype(zero); ... }).
template <typename F>
auto dispatch(DType dtype, F&& f) {
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

}  // namespace torch_fastdet::core
