// Bound by memory: y and grad are read once, and the result is written once.
#include "core/softmax/softmax.h"

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/common/exact_math.h"

namespace torch_fastdet::core {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// With the pitch at most 40 KiB of shared memory, which each GPU has.
template <typename T, int kColumns>
constexpr int kTileRows = 32768 / (kColumns * static_cast<int>(sizeof(T)));
template <typename T, int kColumns>
constexpr int kPitch = kTileRows<T, kColumns> + 1;

// A block brings kTileRows rows of grad to shared memory, rows or columns beside each other, as they lie; each warp
// then takes one row at a time. A lane adds every 32nd column, and the warp its lanes, in the order of torch's kernel,
// which finds the products rounded in a tensor.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads) softmax_backward(const __grid_constant__ SoftmaxBackwardParams p) {
  using A = arithmetic_t<T>;
  extern __shared__ __align__(16) unsigned char room[];
  T* const tile = reinterpret_cast<T*>(room);  // of `columns` rows of kPitch elements
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int columns = static_cast<int>(p.columns);
  constexpr int kRows = kTileRows<T, kColumns>, kStep = kPitch<T, kColumns>;
  const int64_t tiles = (p.rows + kRows - 1) / kRows;
  const int64_t n = blockIdx.x / tiles, first = (blockIdx.x - n * tiles) * kRows;
  const int rows = static_cast<int>(p.rows - first < kRows ? p.rows - first : kRows);
  const T* const grad = static_cast<const T*>(p.grad) + n * p.batch_stride + first * p.row_stride;
  if (p.row_stride == 1) {
    for (int column = warp; column < columns; column += kWarps) {
      if (lane < rows) tile[column * kStep + lane] = grad[lane + column * p.column_stride];
    }
  } else {
    for (int row = warp; row < rows; row += kWarps) {
      for (int column = lane; column < columns; column += kWarp) {
        tile[column * kStep + row] = grad[row * p.row_stride + column * p.column_stride];
      }
    }
  }
  __syncthreads();
  for (int row = warp; row < rows; row += kWarps) {
    const int64_t at = (n * p.rows + first + row) * p.columns;
    const A* const y = static_cast<const A*>(p.y) + at;
    T* const out = static_cast<T*>(p.out) + at;
    A values[kColumns / kWarp], products[kColumns / kWarp];
    A sum = 0;
#pragma unroll
    for (int i = 0; i < kColumns / kWarp; ++i) {
      const int column = i * kWarp + lane;
      values[i] = column < columns ? y[column] : A(0);
      products[i] = column < columns ? mul_rn(values[i], to_arithmetic(tile[column * kStep + row])) : A(0);
      sum += products[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kColumns / kWarp; ++i) {
      const int column = i * kWarp + lane;
      if (column < columns) out[column] = from_arithmetic<T>(fma(-values[i], sum, products[i]));
    }
  }
}

template <typename T, int kColumns>
cudaError_t launch(const SoftmaxBackwardParams& p, cudaStream_t stream) {
  const int bytes = static_cast<int>(p.columns * kPitch<T, kColumns> * sizeof(T));
  if (const cudaError_t error = allow_shared(softmax_backward<T, kColumns>, bytes)) return error;
  const int64_t blocks = p.batch * ((p.rows + kTileRows<T, kColumns> - 1) / kTileRows<T, kColumns>);
  softmax_backward<T, kColumns><<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_softmax_backward(const SoftmaxBackwardParams& params, cudaStream_t stream) {
  return dispatch(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    return params.columns <= 512 ? launch<T, 512>(params, stream) : launch<T, 1024>(params, stream);
  });
}

}  // namespace torch_fastdet::core
