// Define the macro for functions that run on the host and, under nvcc, on the device, and the smallest such functions.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TORCH_FASTDET_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Inline them on the host too, so that a caller compiled for AVX2 includes the arithmetic.
#define TORCH_FASTDET_HOST_DEVICE inline __attribute__((always_inline))
#else
#define TORCH_FASTDET_HOST_DEVICE inline
#endif

namespace torch_fastdet::core {

// Return a / b, rounded up, for a >= 0 and b > 0.
TORCH_FASTDET_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace torch_fastdet::core
