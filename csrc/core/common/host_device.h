// Functions that run on the host and, under nvcc, on the device: the macro that marks them, and the smallest of them.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define TORCH_FASTDET_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Inlined there too: a caller that is compiled for AVX2 takes the arithmetic along.
#define TORCH_FASTDET_HOST_DEVICE inline __attribute__((always_inline))
#else
#define TORCH_FASTDET_HOST_DEVICE inline
#endif

namespace torch_fastdet::core {

// a / b, rounded up. a >= 0, b > 0.
TORCH_FASTDET_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace torch_fastdet::core
