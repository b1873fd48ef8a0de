// The kernels are bound by memory: each thread reads 16 bytes of each operand and writes 16 bytes.
#include "core/slices/slices.h"

#include <algorithm>

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"

namespace torch_fastdet::core {
namespace {

constexpr int kThreads = 256;

// A block's threads cover `lanes` neighbouring vectors of a row, a power of two, in as many rows as that gives.
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

// Return whether all rows begin at a multiple of whole vectors and consist of whole vectors.
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

// A block moves tiles of kPadTile positions and as many channels through shared memory, so that it reads contiguous
// elements whichever of the two dimensions is contiguous, and writes contiguous channels.
template <typename T>
__global__ void __launch_bounds__(kThreads) pad_and_sum(const __grid_constant__ PadAndSumParams p) {
  using A = arithmetic_t<T>;
  constexpr int kRows = kThreads / kPadTile;
  __shared__ T tile[kPadTile][kPadTile + 2];
  __shared__ int64_t offsets[kPadTile];  // of the tile's positions in x; -1 after the last one
  __shared__ A sums[kRows][kPadTile];
  const int column = threadIdx.x % kPadTile, row = threadIdx.x / kPadTile;
  const int64_t first = int64_t{blockIdx.x} * kPadTile;  // first channel
  const bool channels_lie_together = p.channel_stride == 1;
  A sum = 0;
  for (int64_t begin = int64_t{blockIdx.y} * kPadTile; begin < p.positions(); begin += int64_t{gridDim.y} * kPadTile) {
    if (threadIdx.x < kPadTile) {
      const int64_t at = begin + threadIdx.x, image = at / p.pixels;
      offsets[threadIdx.x] =
          at < p.positions() ? image * p.image_stride + (at - image * p.pixels) * p.pixel_stride : -1;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPadTile; i += kRows) {
      const int position = channels_lie_together ? row + i : column, channel = channels_lie_together ? column : row + i;
      const bool given = offsets[position] >= 0 && first + channel < p.channels;
      tile[position][channel] =
          given ? static_cast<const T*>(p.x)[offsets[position] + (first + channel) * p.channel_stride]
                : from_arithmetic<T>(0);
    }
    __syncthreads();
    if (first + column < p.padded) {
#pragma unroll
      for (int i = 0; i < kPadTile; i += kRows) {
        if (begin + row + i < p.positions()) {
          const T value = tile[row + i][column];
          static_cast<T*>(p.out)[(begin + row + i) * p.padded + first + column] = value;
          sum += to_arithmetic(value);
        }
      }
    }
  }
  sums[row][column] = sum;
  __syncthreads();
  if (row == 0 && first + column < p.padded) {
    for (int i = 1; i < kRows; ++i) sum += sums[i][column];
    static_cast<A*>(p.partials)[blockIdx.y * p.padded + first + column] = sum;
  }
}

// A warp's lanes take neighbouring channels, and the warps of a block share the splits.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_partials(const arithmetic_t<T>* partials, int splits, int64_t channels, T* sums_of_all) {
  using A = arithmetic_t<T>;
  constexpr int kRows = kThreads / kWarp;
  __shared__ A sums[kRows][kWarp];
  const int column = threadIdx.x % kWarp, row = threadIdx.x / kWarp;
  const int64_t channel = int64_t{blockIdx.x} * kWarp + column;
  A sum = 0;
  if (channel < channels) {
#pragma unroll 8
    for (int i = row; i < splits; i += kRows) sum += partials[i * channels + channel];
  }
  sums[row][column] = sum;
  __syncthreads();
  if (row == 0 && channel < channels) {
    for (int i = 1; i < kRows; ++i) sum += sums[i][column];
    sums_of_all[channel] = from_arithmetic<T>(sum);
  }
}

template <typename T>
void add_all(const void* partials, int splits, int64_t channels, void* sums, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((channels + kWarp - 1) / kWarp);
  add_partials<T><<<blocks, kThreads, 0, stream>>>(static_cast<const arithmetic_t<T>*>(partials), splits, channels,
                                                   static_cast<T*>(sums));
}

// A block's threads cover `lanes` neighbouring vectors of a row, a power of two of at most a warp, in several rows.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ SumRowsParams p, int lanes) {
  using A = arithmetic_t<T>;
  constexpr int kAhead = 4;  // reads in flight
  __shared__ A shared[kThreads * kVector];
  const int lane = threadIdx.x % lanes, row = threadIdx.x / lanes, block_rows = kThreads / lanes;
  const int64_t first = (int64_t{blockIdx.x} * lanes + lane) * kVector;
  A sum[kVector] = {};
  if (first < p.width) {
    const int64_t step = int64_t{gridDim.y} * block_rows;
    for (int64_t at = int64_t{blockIdx.y} * block_rows + row; at < p.rows; at += kAhead * step) {
      Vector<T, kVector> packs[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (at + u * step < p.rows) {
          packs[u] = *reinterpret_cast<const Vector<T, kVector>*>(static_cast<const T*>(p.x) +
                                                                  (at + u * step) * p.width + first);
        }
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (at + u * step < p.rows) {
#pragma unroll
          for (int j = 0; j < kVector; ++j) sum[j] += to_arithmetic(packs[u].x[j]);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) shared[(row * kVector + j) * lanes + lane] = sum[j];
  __syncthreads();
  for (int at = threadIdx.x; at < lanes * kVector; at += kThreads) {
    const int64_t column = (int64_t{blockIdx.x} * lanes + at % lanes) * kVector + at / lanes;
    A total = 0;
    for (int i = 0; i < block_rows; ++i) total += shared[i * kVector * lanes + at];
    if (column < p.width) static_cast<A*>(p.partials)[blockIdx.y * p.width + column] = total;
  }
}

template <typename T, int kVector>
void launch_rows(const SumRowsParams& p, cudaStream_t stream) {
  const int64_t columns = p.width / kVector;
  int lanes = 1;
  while (lanes < kWarp && lanes < columns) lanes *= 2;
  const dim3 grid(static_cast<unsigned>((columns + lanes - 1) / lanes), p.splits());
  sum_rows<T, kVector><<<grid, kThreads, 0, stream>>>(p, lanes);
  add_all<T>(p.partials, p.splits(), p.width, p.sums, stream);
}

}  // namespace

cudaError_t launch_pad_and_sum(const PadAndSumParams& params, cudaStream_t stream) {
  const auto blocks = [&](int channels) { return static_cast<unsigned>((params.padded + channels - 1) / channels); };
  dispatch(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    pad_and_sum<T><<<dim3(blocks(kPadTile), params.splits()), kThreads, 0, stream>>>(params);
    add_all<T>(params.partials, params.splits(), params.padded, params.sums, stream);
  });
  return cudaGetLastError();
}

cudaError_t launch_sum_rows(const SumRowsParams& params, cudaStream_t stream) {
  dispatch(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kVector = 16 / sizeof(T);
    const bool aligned = params.width % kVector == 0 && reinterpret_cast<uintptr_t>(params.x) % 16 == 0;
    aligned ? launch_rows<T, kVector>(params, stream) : launch_rows<T, 1>(params, stream);
  });
  return cudaGetLastError();
}

cudaError_t launch_sum_slices(const SumSlicesParams& params, cudaStream_t stream) {
  dispatch(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kVector = 16 / sizeof(T);
    is_aligned(params, kVector) ? launch<T, kVector>(params, stream) : launch<T, 1>(params, stream);
  });
  return cudaGetLastError();
}

}  // namespace torch_fastdet::core
