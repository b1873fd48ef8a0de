// Multiply small float16 or bfloat16 matrices with a warp on tensor cores of compute capability 8.0 or newer, with sums
// in float32. Of an 8 x 8 matrix, a lane has the two neighbours in row lane / 4 from column 2 * (lane % 4) on, the
// first in the low half of a register.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "core/common/device.cuh"

#ifndef __CUDACC__
#include "tensor_core_emulator.h"  // tests/cpp/emulator
#endif

namespace torch_fastdet::core {

#ifdef __CUDACC__

// Load four 8 x 8 matrices from shared memory. Lane i passes row i % 8 of matrix i / 8. kTransposed transposes each.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], const void* row) {
#if __CUDA_ARCH__ < 800
  __trap();
#else
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// Add left (16 x 16) * right (16 x 8), of T, to sums (16 x 8). Sums [0] and [1] are in row lane / 4, [2] and [3] 8
// below. `left` has quarters above, below, above right, below right; `right` has upper and lower halves, transposed.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint32_t (&left)[4], uint32_t upper,
                                             uint32_t lower) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
#if __CUDA_ARCH__ < 800
  __trap();
#else
  if (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(upper), "r"(lower));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(upper), "r"(lower));
  }
#endif
}

#endif

}  // namespace torch_fastdet::core
