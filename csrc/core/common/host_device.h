// The one macro of the core: a function that runs on the host and, under nvcc, on the device.
#pragma once

#ifdef __CUDACC__
#define TORCH_FASTDET_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Inlined there too: a caller that is compiled for AVX2 takes the arithmetic along.
#define TORCH_FASTDET_HOST_DEVICE inline __attribute__((always_inline))
#else
#define TORCH_FASTDET_HOST_DEVICE inline
#endif
