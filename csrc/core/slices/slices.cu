// Bound by memory: each thread reads 16 bytes of each operand and writes 16 bytes.
#include "core/slices/slices.h"

#include <algorithm>

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"

namespace torch_fastdet::core {
namespace {

constexpr int kThreads = 256;

// A block's threads are `lanes` beside each other in a row, a power of two, in as many rows as that gives.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads) sum_slices(const __grid_constant__ SumSlicesParams p, int lanes) {
  using Pack = Vector<T, kVector>;
  const int block_rows = kThreads / lanes;
  const int64_t first_row = int64_t{blockIdx.x} * block_rows + threadIdx.x / lanes;
  const int64_t first = (int64_t{blockIdx.y} * lanes + threadIdx.x % lanes) * kVector;
  for (int64_t row = first_row; row < p.rows; row += int64_t{gridDim.x} * block_rows) {
    for (int64_t at = first; at < p.width; at += int64_t{gridDim.y} * lanes * kVector) {
      Pack packs[kMostSlices];
#pragma unroll
      for (int i = 0; i < kMostSlices; ++i) {
        if (i < p.count) {
          packs[i] = *reinterpret_cast<const Pack*>(static_cast<const T*>(p.x[i]) + row * p.x_pitch[i] + at);
        }
      }
#pragma unroll
      for (int i = 1; i < kMostSlices; ++i) {
        if (i < p.count) {
#pragma unroll
          for (int j = 0; j < kVector; ++j) packs[0].x[j] = rounded_sum(packs[0].x[j], packs[i].x[j]);
        }
      }
      *reinterpret_cast<Pack*>(static_cast<T*>(p.out) + row * p.out_pitch + at) = packs[0];
    }
  }
}

// Whether all rows begin at and consist of whole vectors.
bool is_aligned(const SumSlicesParams& p, int vector) {
  const auto fits = [&](const void* data, int64_t pitch) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && (pitch % vector == 0 || p.rows == 1);
  };
  bool aligned = p.width % vector == 0 && fits(p.out, p.out_pitch);
  for (int i = 0; i < p.count; ++i) aligned = aligned && fits(p.x[i], p.x_pitch[i]);
  return aligned;
}

template <typename T, int kVector>
void launch(const SumSlicesParams& p, cudaStream_t stream) {
  const int64_t columns = p.width / kVector;
  int lanes = 1;
  while (lanes < kThreads && lanes < columns) lanes *= 2;
  const int64_t block_rows = kThreads / lanes;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>((p.rows + block_rows - 1) / block_rows, 1 << 30)),
                  static_cast<unsigned>(std::min<int64_t>((columns + lanes - 1) / lanes, 65535)));
  sum_slices<T, kVector><<<grid, kThreads, 0, stream>>>(p, lanes);
}

}  // namespace

cudaError_t launch_sum_slices(const SumSlicesParams& params, cudaStream_t stream) {
  dispatch(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kVector = 16 / sizeof(T);
    is_aligned(params, kVector) ? launch<T, kVector>(params, stream) : launch<T, 1>(params, stream);
  });
  return cudaGetLastError();
}

}  // namespace torch_fastdet::core
