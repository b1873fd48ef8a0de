// Device types of DType: their Storage, the switch from a DType to its type, and elements whose type is known at run
// time only.
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

// Element i of `data`, whose type is `dtype`, as an A.
template <typename A>
__device__ __forceinline__ A load_element(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat16:
      return to_arithmetic(static_cast<const __half*>(data)[i]);
    case DType::kBFloat16:
      return to_arithmetic(static_cast<const __nv_bfloat16*>(data)[i]);
    case DType::kFloat32:
      return static_cast<const float*>(data)[i];
    case DType::kFloat64:
      break;
  }
  return static_cast<A>(static_cast<const double*>(data)[i]);
}

template <typename A>
__device__ __forceinline__ void store_element(void* data, DType dtype, int64_t i, A value) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<__half*>(data)[i] = from_arithmetic<__half>(static_cast<float>(value));
      return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[i] = from_arithmetic<__nv_bfloat16>(static_cast<float>(value));
      return;
    case DType::kFloat32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      return;
    case DType::kFloat64:
      static_cast<double*>(data)[i] = static_cast<double>(value);
  }
}

}  // namespace torch_fastdet::core
