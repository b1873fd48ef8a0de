// Run five Newton-Schulz steps over matrices of any shapes, with one launch for each product. A step is X <- a X + (b A
// + c A A) X with A = X X', which drives the singular values of X towards 1. Products are bfloat16 with float32 sums.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"

namespace torch_fastdet::core {

constexpr int kNsSteps = 5;
constexpr float kNsA = 3.4445f, kNsB = -4.7750f, kNsC = 2.0315f;
constexpr int kNsTile = 64;          // rows and columns of a block's tile of a symmetric product
constexpr int kNsTall = 128;         // rows of a block's tile of the other product; the last tile may be half outside
constexpr int kNsWide = 128;         // columns of that tile
constexpr int64_t kNsChunk = 8192;   // elements that a block squares and adds
constexpr int64_t kNsAlignment = 8;  // matrices begin at a multiple of this many elements in source and result

// Describe a contiguous matrix; the workspace's is transposed to be at least as wide as high, and zero-padded to tiles.
struct NsMatrix {
  int64_t source;  // offset in source and result
  int64_t x;       // offset in the workspace's x
  int64_t gram;    // offset in the workspace's gram and polynomial
  int32_t rows, columns;
  int32_t first_chunk, chunks;  // of its sums of squares
  float scale;                  // applied to the result
  int32_t reserved;
};

// A block works on this part of a matrix: tile (row, column), or chunk `row`.
struct NsTile {
  int32_t matrix, row, column;
};

struct NsParams {
  const NsMatrix* matrices;  // in device memory, like the three lists below
  const NsTile* chunks;      // of kNsChunk elements
  const NsTile* squares;     // kNsTile x kNsTile, on and above the diagonal
  const NsTile* tiles;       // kNsTall x kNsWide
  int64_t num_chunks, num_squares, num_tiles;
  const void* source;  // bfloat16
  float* result;
  // The workspace holds each matrix twice, its Gram matrix, the polynomial of that, and the sums of squares.
  void* x[2];
  void* gram;
  void* polynomial;
  float* squared;  // (num_chunks)
};

// Call this once for each device, before the first launch there.
cudaError_t prepare_newton_schulz();
// Launch 17 kernels. They need compute capability 8.0.
cudaError_t launch_newton_schulz(const NsParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
