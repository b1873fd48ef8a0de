// These are the kernels of stem_conv.cu, for all tile shapes. A block computes one tile of pixels after the other.
// Asynchronous copies bring squares to shared memory kStages - 1 tiles ahead, and tensor cores multiply them: a pixel's
// sixteen channels are one step of the sum. A warp goes down kRows rows, 16 pixels wide, so that it reads each row of
// squares from shared memory once for all rows of the convolution kernel.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <cstring>

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/common/tensor_core.cuh"
#include "core/stem_conv/stem_conv.h"

namespace torch_fastdet::core {

// A warp computes kRows x 16 pixels and kChunk of kOutputs outputs; each chunk has kWarpsX x kWarpsY warps.
template <typename T, int kSideOf, int kOutputsOf, int kChunkOf, int kRowsOf, int kWarpsX, int kWarpsY, int kStagesOf,
          int kBlocksOf>
struct StemTile {
  using Element = T;
  static constexpr int kSide = kSideOf, kOutputs = kOutputsOf, kChunk = kChunkOf, kRows = kRowsOf;
  static constexpr int kStages = kStagesOf, kBlocks = kBlocksOf;  // per multiprocessor, as registers and memory allow
  static constexpr int kSpots = kWarpsX * kWarpsY, kChunks = kOutputs / kChunk;
  static constexpr int kThreads = kSpots * kChunks * kWarp;
  static constexpr int kHeight = kRows * kWarpsY, kWidth = 16 * kWarpsX;
  static constexpr int kSquareHeight = kHeight + kSide - 1, kSquareWidth = kWidth + kSide - 1;
  static constexpr int kSquares = kSquareHeight * kSquareWidth * kStemChannels;  // elements
  static constexpr int kGradPitch = kOutputs + 8;  // of a pixel; avoids bank conflicts of eight pixels
  static constexpr int kGrads = kHeight * kWidth * kGradPitch;
  static constexpr int kTaps = kSide * kSide;
  static constexpr int kMatrices = kChunk / 8;  // matrices of 8 outputs
  static_assert(kOutputs % kChunk == 0 && kChunk % 16 == 0 && kThreads <= 1024, "whole matrices");

  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
  static __device__ __forceinline__ int spot() { return warp() % kSpots; }
  static __device__ __forceinline__ int row() { return spot() / kWarpsX * kRows; }
  static __device__ __forceinline__ int column() { return spot() % kWarpsX * 16; }
  static __device__ __forceinline__ int chunk() { return warp() / kSpots * kChunk; }
};

// Locate a tile.
struct StemPlace {
  int64_t image;
  int y, x;
};

template <typename Tile>
struct StemGrid {
  unsigned columns, rows, tiles;

  __device__ __forceinline__ explicit StemGrid(const StemConvSizes& sizes)
      : columns(static_cast<unsigned>(ceil_div(sizes.width, Tile::kWidth))),
        rows(static_cast<unsigned>(ceil_div(sizes.height, Tile::kHeight))),
        tiles(columns * rows * static_cast<unsigned>(sizes.batch)) {}

  __device__ __forceinline__ StemPlace place(unsigned tile) const {
    const unsigned line = tile / columns, image = line / rows;
    return {image, static_cast<int>(line - image * rows) * Tile::kHeight,
            static_cast<int>(tile - line * columns) * Tile::kWidth};
  }
};

// Return where half of a square's channels lie; every other four squares swap halves to avoid bank conflicts.
__device__ __forceinline__ int stem_square(int column, int half) {
  return column * kStemChannels + (half ^ (column >> 2 & 1)) * 8;
}

__device__ __forceinline__ void stem_copy(void* to, const void* from, bool inside) {
  if (inside) {
    __pipeline_memcpy_async(to, from, 16);
  } else {
    *static_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
}

// Begin to copy the squares that a tile reads, with zeros outside the image.
template <typename Tile>
__device__ __forceinline__ void stem_fetch_squares(typename Tile::Element* to, const StemConvSizes& sizes,
                                                   const void* squares, const StemPlace& place) {
  using T = typename Tile::Element;
  const int height = static_cast<int>(sizes.square_height()), width = static_cast<int>(sizes.square_width());
  const T* const image = static_cast<const T*>(squares) + place.image * height * width * kStemChannels;
  constexpr int kBorder = Tile::kSide == 3, kRow = 2 * Tile::kSquareWidth;
  for (int v = threadIdx.x; v < Tile::kSquareHeight * kRow; v += Tile::kThreads) {
    const int row = v / kRow, column = v % kRow / 2, half = v % 2;
    const int y = place.y + row - kBorder, x = place.x + column - kBorder;
    const bool inside = static_cast<unsigned>(y) < static_cast<unsigned>(height) &&
                        static_cast<unsigned>(x) < static_cast<unsigned>(width);
    stem_copy(to + row * Tile::kSquareWidth * kStemChannels + stem_square(column, half),
              image + (inside ? (y * width + x) * kStemChannels + half * 8 : 0), inside);
  }
}

template <typename Tile>
__device__ __forceinline__ void stem_fetch_grads(typename Tile::Element* to, const StemConvSizes& sizes,
                                                 const void* grads, const StemPlace& place) {
  using T = typename Tile::Element;
  const int height = static_cast<int>(sizes.height), width = static_cast<int>(sizes.width);
  const T* const image = static_cast<const T*>(grads) + place.image * height * width * Tile::kOutputs;
  constexpr int kPieces = Tile::kOutputs / 8;
  for (int v = threadIdx.x; v < Tile::kHeight * Tile::kWidth * kPieces; v += Tile::kThreads) {
    const int pixel = v / kPieces, piece = v % kPieces * 8;
    const int y = place.y + pixel / Tile::kWidth, x = place.x + pixel % Tile::kWidth;
    const bool inside = y < height && x < width;
    stem_copy(to + pixel * Tile::kGradPitch + piece, image + (inside ? (y * width + x) * Tile::kOutputs + piece : 0),
              inside);
  }
}

template <typename T>
__device__ __forceinline__ uint32_t stem_pair(float first, float second) {
  const Vector<T, 2> pair{{from_arithmetic<T>(first), from_arithmetic<T>(second)}};
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

// Column 2 t + b of matrix j is output 2 kMatrices t + 2 j + b of a chunk, so that lanes hold neighbouring outputs.
template <typename Tile>
__device__ __forceinline__ void stem_load_weights(uint32_t (&weights)[Tile::kTaps][Tile::kMatrices][2],
                                                  const void* weight) {
  using T = typename Tile::Element;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, column = lane / 4;
#pragma unroll
  for (int j = 0; j < Tile::kMatrices; ++j) {
    const int output = Tile::chunk() + column / 2 * 2 * Tile::kMatrices + 2 * j + column % 2;
    const T* const from = static_cast<const T*>(weight) + output * Tile::kTaps * kStemChannels + 2 * (lane % 4);
#pragma unroll
    for (int tap = 0; tap < Tile::kTaps; ++tap) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weights[tap][j][half] = __ldg(reinterpret_cast<const uint32_t*>(from + tap * kStemChannels + half * 8));
      }
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void stem_store_row(typename Tile::Element* image, const StemConvSizes& sizes, int y, int x,
                                               const float (&sums)[Tile::kMatrices][4]) {
  using T = typename Tile::Element;
  constexpr int kWords = Tile::kMatrices % 4 ? 2 : 4;  // in a piece of 16 or 8 bytes
  static_assert(Tile::kMatrices % kWords == 0, "whole pieces");
  const int lane = static_cast<int>(threadIdx.x) % kWarp, width = static_cast<int>(sizes.width);
  if (y >= sizes.height) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = x + lane / 4 + half * 8;
    if (column >= width) continue;
    T* const to = image + (y * width + column) * Tile::kOutputs + Tile::chunk() + lane % 4 * 2 * Tile::kMatrices;
#pragma unroll
    for (int first = 0; first < Tile::kMatrices; first += kWords) {
      Vector<uint32_t, kWords> piece;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        piece.x[j] = stem_pair<T>(sums[first + j][2 * half], sums[first + j][2 * half + 1]);
      }
      *reinterpret_cast<Vector<uint32_t, kWords>*>(to + 2 * first) = piece;
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void stem_multiply_tile(const typename Tile::Element* squares,
                                                   const uint32_t (&weights)[Tile::kTaps][Tile::kMatrices][2],
                                                   const StemConvSizes& sizes, typename Tile::Element* out,
                                                   const StemPlace& place) {
  using T = typename Tile::Element;
  constexpr int kSide = Tile::kSide, kPitch = Tile::kSquareWidth * kStemChannels;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* at[kSide];  // this lane's row of the first four 8 x 8 matrices for each column of the convolution kernel
#pragma unroll
  for (int dx = 0; dx < kSide; ++dx) {
    at[dx] = squares + Tile::row() * kPitch + stem_square(Tile::column() + dx + lane % 16, lane / 16);
  }
  T* const image = out + place.image * sizes.height * sizes.width * Tile::kOutputs;
  float sums[kSide][Tile::kMatrices][4];  // of the output rows to which the current row of squares adds
#pragma unroll
  for (int r = 0; r < Tile::kRows + kSide - 1; ++r) {
    if (r < Tile::kRows) memset(sums[r % kSide], 0, sizeof sums[r % kSide]);
#pragma unroll
    for (int dx = 0; dx < kSide; ++dx) {
      uint32_t pixels[4];
      load_matrices<false>(pixels, at[dx] + r * kPitch);
#pragma unroll
      for (int dy = 0; dy < kSide; ++dy) {
        if (r - dy < 0 || r - dy >= Tile::kRows) continue;
#pragma unroll
        for (int j = 0; j < Tile::kMatrices; ++j) {
          const uint32_t(&right)[2] = weights[dy * kSide + dx][j];
          multiply_add<T>(sums[(r - dy + kSide) % kSide][j], pixels, right[0], right[1]);
        }
      }
    }
    const int done = r - (kSide - 1);
    if (done < 0) continue;
    stem_store_row<Tile>(image, sizes, place.y + Tile::row() + done, place.x + Tile::column(), sums[done % kSide]);
  }
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    stem_conv_forward(const __grid_constant__ StemConvForwardParams p) {
  using T = typename Tile::Element;
  extern __shared__ __align__(128) unsigned char shared[];
  auto* const stages = reinterpret_cast<T*>(shared);
  const StemGrid<Tile> grid(p.sizes);
  const auto fetch = [&](unsigned index) {
    const unsigned tile = blockIdx.x + index * gridDim.x;
    if (tile < grid.tiles) {
      stem_fetch_squares<Tile>(stages + index % Tile::kStages * Tile::kSquares, p.sizes, p.squares, grid.place(tile));
    }
    __pipeline_commit();
  };
  for (unsigned index = 0; index < Tile::kStages - 1; ++index) fetch(index);
  uint32_t weights[Tile::kTaps][Tile::kMatrices][2];
  stem_load_weights<Tile>(weights, p.weight);
  unsigned index = 0;
  for (unsigned tile = blockIdx.x; tile < grid.tiles; tile += gridDim.x, ++index) {
    __pipeline_wait_prior(Tile::kStages - 2);
    __syncthreads();  // all threads' copies have arrived, and no thread still reads the stage that is fetched next
    fetch(index + Tile::kStages - 1);
    stem_multiply_tile<Tile>(stages + index % Tile::kStages * Tile::kSquares, weights, p.sizes, static_cast<T*>(p.out),
                             grid.place(tile));
  }
}

// Add to sums the products of squares and gradients for each tap, over a warp's pixels of a tile.
template <typename Tile>
__device__ __forceinline__ void stem_correlate_tile(const typename Tile::Element* squares,
                                                    const typename Tile::Element* grads,
                                                    float (&sums)[Tile::kTaps][Tile::kMatrices][4]) {
  using T = typename Tile::Element;
  constexpr int kSide = Tile::kSide, kPitch = Tile::kSquareWidth * kStemChannels;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* at[kSide];
#pragma unroll
  for (int dx = 0; dx < kSide; ++dx) {
    const int column = Tile::column() + dx + lane % 8 + lane / 16 * 8;
    at[dx] = squares + Tile::row() * kPitch + stem_square(column, lane / 8 % 2);
  }
  const T* const grads_at = grads + (Tile::row() * Tile::kWidth + Tile::column() + lane % 16) * Tile::kGradPitch +
                            Tile::chunk() + lane / 16 * 8;
  uint32_t right[kSide][Tile::kMatrices / 2][4];  // of the gradient rows that multiply the current row of squares
#pragma unroll
  for (int r = 0; r < Tile::kRows + kSide - 1; ++r) {
#pragma unroll
    for (int j = 0; j < Tile::kMatrices / 2; ++j) {
      if (r >= Tile::kRows) continue;
      load_matrices<true>(right[r % kSide][j], grads_at + r * Tile::kWidth * Tile::kGradPitch + j * 16);
    }
#pragma unroll
    for (int dx = 0; dx < kSide; ++dx) {
      uint32_t left[4];
      load_matrices<true>(left, at[dx] + r * kPitch);
#pragma unroll
      for (int dy = 0; dy < kSide; ++dy) {
        if (r - dy < 0 || r - dy >= Tile::kRows) continue;
#pragma unroll
        for (int j = 0; j < Tile::kMatrices; ++j) {
          const uint32_t(&grad)[4] = right[(r - dy + kSide) % kSide][j / 2];
          multiply_add<T>(sums[dy * kSide + dx][j], left, grad[j % 2 * 2], grad[j % 2 * 2 + 1]);
        }
      }
    }
  }
}

// Add up a block's sums over its warps, in their order, in the memory layout of the weights.
template <typename Tile>
__device__ __forceinline__ void stem_add_warps(float* total, const float (&sums)[Tile::kTaps][Tile::kMatrices][4]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int turn = 0; turn < Tile::kSpots; ++turn) {
    __syncthreads();
    if (Tile::spot() != turn) continue;
#pragma unroll
    for (int tap = 0; tap < Tile::kTaps; ++tap) {
#pragma unroll
      for (int j = 0; j < Tile::kMatrices; ++j) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const int output = Tile::chunk() + j * 8 + 2 * (lane % 4) + s % 2, channel = lane / 4 + s / 2 * 8;
          float& element = total[(output * Tile::kTaps + tap) * kStemChannels + channel];
          element = turn ? element + sums[tap][j][s] : sums[tap][j][s];
        }
      }
    }
  }
  __syncthreads();
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    stem_conv_backward_parts(const __grid_constant__ StemConvBackwardParams p) {
  using T = typename Tile::Element;
  extern __shared__ __align__(128) unsigned char shared[];
  constexpr int kStage = Tile::kSquares + Tile::kGrads;
  auto* const stages = reinterpret_cast<T*>(shared);
  const StemGrid<Tile> grid(p.sizes);
  const auto fetch = [&](unsigned index) {
    const unsigned tile = blockIdx.x + index * gridDim.x;
    if (tile < grid.tiles) {
      T* const stage = stages + index % Tile::kStages * kStage;
      stem_fetch_squares<Tile>(stage, p.sizes, p.squares, grid.place(tile));
      stem_fetch_grads<Tile>(stage + Tile::kSquares, p.sizes, p.grad_out, grid.place(tile));
    }
    __pipeline_commit();
  };
  for (unsigned index = 0; index < Tile::kStages - 1; ++index) fetch(index);
  float sums[Tile::kTaps][Tile::kMatrices][4] = {};
  unsigned index = 0;
  for (unsigned tile = blockIdx.x; tile < grid.tiles; tile += gridDim.x, ++index) {
    __pipeline_wait_prior(Tile::kStages - 2);
    __syncthreads();
    fetch(index + Tile::kStages - 1);
    const T* const stage = stages + index % Tile::kStages * kStage;
    stem_correlate_tile<Tile>(stage, stage + Tile::kSquares, sums);
  }
  __pipeline_wait_prior(0);
  auto* const total = reinterpret_cast<float*>(shared);
  stem_add_warps<Tile>(total, sums);
  constexpr int kWeights = Tile::kOutputs * Tile::kTaps * kStemChannels;
  float* const part = p.parts + int64_t{blockIdx.x} * kWeights;
  for (int i = threadIdx.x; i < kWeights / 4; i += Tile::kThreads) {
    reinterpret_cast<float4*>(part)[i] = reinterpret_cast<const float4*>(total)[i];
  }
}

constexpr int kStemSumWarps = 16;

// Add up the blocks' sums. A lane takes a weight, and a warp every sixteenth block.
template <typename T>
__global__ void __launch_bounds__(kStemSumWarps* kWarp)
    stem_conv_backward_sum(const __grid_constant__ StemConvBackwardParams p) {
  __shared__ float warps[kStemSumWarps][kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t weights = p.sizes.weights(), weight = int64_t{blockIdx.x} * kWarp + lane;
  float sum = 0.f;
#pragma unroll 4
  for (int64_t block = warp; block < p.blocks; block += kStemSumWarps) sum += p.parts[block * weights + weight];
  warps[warp][lane] = sum;
  __syncthreads();
  if (warp) return;
#pragma unroll
  for (int i = 1; i < kStemSumWarps; ++i) sum += warps[i][lane];
  static_cast<T*>(p.grad_weight)[weight] = from_arithmetic<T>(sum);
}

template <typename Tile>
constexpr int stem_forward_bytes() {
  return Tile::kStages * Tile::kSquares * static_cast<int>(sizeof(typename Tile::Element));
}

template <typename Tile>
constexpr int stem_backward_bytes() {
  constexpr int kStages = Tile::kStages * (Tile::kSquares + Tile::kGrads) * static_cast<int>(sizeof(short));
  constexpr int kTotal = Tile::kOutputs * Tile::kTaps * kStemChannels * static_cast<int>(sizeof(float));
  return kStages > kTotal ? kStages : kTotal;
}

template <typename Tile>
int64_t stem_tiles(const StemConvSizes& sizes) {
  return ceil_div(sizes.width, Tile::kWidth) * ceil_div(sizes.height, Tile::kHeight) * sizes.batch;
}

// Return the number of blocks with this much shared memory that run at a time, at most the number of tiles.
template <typename Tile>
cudaError_t stem_blocks(const StemConvSizes& sizes, int bytes, int64_t& blocks) {
  int device = 0, processors = 0, shared = 0, reserved = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto ask = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  };
  ask(processors, cudaDevAttrMultiProcessorCount);
  ask(shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  ask(reserved, cudaDevAttrReservedSharedMemoryPerBlock);
  const int fit = shared / (bytes + reserved), wanted = fit < Tile::kBlocks ? fit : Tile::kBlocks;
  const int64_t most = int64_t{processors} * (wanted > 1 ? wanted : 1), tiles = stem_tiles<Tile>(sizes);
  blocks = tiles < most ? tiles : most;
  return error;
}

template <typename Tile>
cudaError_t stem_launch_forward(const StemConvForwardParams& params, cudaStream_t stream) {
  constexpr int kBytes = stem_forward_bytes<Tile>();
  int64_t blocks = 0;
  cudaError_t error = stem_blocks<Tile>(params.sizes, kBytes, blocks);
  if (error == cudaSuccess) error = allow_shared(stem_conv_forward<Tile>, kBytes);
  if (error != cudaSuccess) return error;
  stem_conv_forward<Tile><<<static_cast<unsigned>(blocks), Tile::kThreads, kBytes, stream>>>(params);
  return cudaGetLastError();
}

template <typename Tile>
cudaError_t stem_launch_backward(const StemConvBackwardParams& params, cudaStream_t stream) {
  constexpr int kBytes = stem_backward_bytes<Tile>();
  if (const cudaError_t error = allow_shared(stem_conv_backward_parts<Tile>, kBytes)) return error;
  stem_conv_backward_parts<Tile><<<static_cast<unsigned>(params.blocks), Tile::kThreads, kBytes, stream>>>(params);
  const auto sums = static_cast<unsigned>(params.sizes.weights() / kWarp);
  stem_conv_backward_sum<typename Tile::Element><<<sums, kStemSumWarps * kWarp, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace torch_fastdet::core
