// Run Newton-Schulz steps on the GPU. Each product of a step is one launch over the tiles of all matrices, so that
// small matrices fill the GPU together. A block computes one tile: asynchronous copies bring the operands to shared
// memory some steps ahead (steps of 64 and four warps for the symmetric products, of 32 and eight for the other), and
// tensor cores multiply them. Matrices are zero-padded to whole tiles, so that no product has a border.
#include <cuda_bf16.h>
#include <cuda_pipeline_primitives.h>

#include <climits>
#include <cstring>

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/common/tensor_core.cuh"
#include "core/newton_schulz/newton_schulz.h"
#include "core/newton_schulz/newton_schulz_plan.h"

namespace torch_fastdet::core {
namespace {

using Element = __nv_bfloat16;
using Elements = Vector<Element>;

// Pack two values into a register; Elements needs four of these.
__device__ __forceinline__ uint32_t pack(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  uint32_t packed;
  memcpy(&packed, &pair, sizeof packed);
  return packed;
}

__device__ __forceinline__ void store(Element* to, const float (&x)[Elements::kSize]) {
  // Do not assign the vector: nvcc 13.0 turns that into four stores.
  __stcg(reinterpret_cast<uint4*>(to),
         make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])));
}

__device__ __forceinline__ void load(const Element* from, float (&x)[Elements::kSize]) {
  const uint4 packed = *reinterpret_cast<const uint4*>(from);
  const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int k = 0; k < Elements::kSize; ++k) {  // a bfloat16 is the upper half of a float
    x[k] = __uint_as_float(k % 2 ? pairs[k / 2] & 0xffff0000u : pairs[k / 2] << 16);
  }
}

constexpr int kPlainThreads = 256;  // of kernels that compute no products
constexpr int kPad = 8;             // elements between rows of shared memory that avoid bank conflicts

// Each block sums the squares of one chunk.
__global__ void __launch_bounds__(kPlainThreads) square_kernel(const NsParams p) {
  const NsTile tile = p.chunks[blockIdx.x];
  const NsMatrix matrix = p.matrices[tile.matrix];
  const int64_t begin = tile.row * kNsChunk, numel = int64_t{matrix.rows} * matrix.columns;
  const int64_t end = begin + kNsChunk < numel ? begin + kNsChunk : numel;
  const Element* source = static_cast<const Element*>(p.source) + matrix.source;
  float sum[1] = {0.f};
  int64_t i = begin + threadIdx.x * Elements::kSize;
  for (; i + Elements::kSize <= end; i += kPlainThreads * Elements::kSize) {
    float values[Elements::kSize];
    load(source + i, values);
#pragma unroll
    for (int k = 0; k < Elements::kSize; ++k) sum[0] += values[k] * values[k];
  }
  for (; i < end; ++i) {  // only for the one thread whose vector is cut off
    const float value = to_arithmetic(source[i]);
    sum[0] += value * value;
  }
  block_sum<kPlainThreads>(sum);
  if (threadIdx.x == 0) p.squared[blockIdx.x] = sum[0];
}

// Store the matrices, each divided by its norm, in x[0]. Values are rounded where eager code stores them.
__global__ void __launch_bounds__(kPlainThreads) normalize_kernel(const NsParams p) {
  const NsTile tile = p.tiles[blockIdx.x];
  const NsMatrix matrix = p.matrices[tile.matrix];
  float sum = 0.f;
  for (int i = threadIdx.x % kWarp; i < matrix.chunks; i += kWarp) sum += p.squared[matrix.first_chunk + i];
  const float norm = Storage<Element>::round(sqrtf(warp_sum(sum)));
  const float divisor = Storage<Element>::round(norm + 1e-7f);
  const Element* source = static_cast<const Element*>(p.source) + matrix.source;
  const int64_t height = ns_short(matrix), width = ns_long(matrix), stride = ns_width(matrix);
  Element* x = static_cast<Element*>(p.x[0]) + matrix.x;
  const bool transposed = matrix.rows > matrix.columns, aligned = !transposed && width % Elements::kSize == 0;
  constexpr int kVectors = kNsWide / Elements::kSize;
  const int64_t first = int64_t{tile.row} * kNsTall;
  const int rows = static_cast<int>(ns_height(matrix) - first < kNsTall ? ns_height(matrix) - first : kNsTall);
  for (int v = threadIdx.x; v < rows * kVectors; v += kPlainThreads) {
    const int64_t i = first + v / kVectors;
    const int64_t j = int64_t{tile.column} * kNsWide + v % kVectors * Elements::kSize;
    float values[Elements::kSize];
    if (aligned && i < height && j + Elements::kSize <= width) {
      load(source + i * width + j, values);
#pragma unroll
      for (int k = 0; k < Elements::kSize; ++k) values[k] /= divisor;
      store(x + i * stride + j, values);
      continue;
    }
#pragma unroll
    for (int k = 0; k < Elements::kSize; ++k) {
      const bool inside = i < height && j + k < width;
      const int64_t at = transposed ? (j + k) * matrix.columns + i : i * matrix.columns + j + k;
      values[k] = inside ? to_arithmetic(source[at]) / divisor : 0.f;
    }
    store(x + i * stride + j, values);
  }
}

// Compute a product with kStages tiles of each operand in shared memory. kTransposed refers to the right operand.
template <int kRows, int kColumns, bool kTransposed, int kStep, int kStages>
struct Product {
  static constexpr int kDepth = kStep;  // length of a step along the sum
  static constexpr int kWarpRows = 32, kWarpColumns = kColumns / 2;
  static constexpr int kThreads = kRows / kWarpRows * 2 * kWarp;
  static constexpr int kRowPairs = kWarpRows / 16, kColumnPairs = kWarpColumns / 16;  // in 8 x 8 matrices
  static constexpr int kLeftStride = kDepth + kPad;
  static constexpr int kRightRows = kTransposed ? kColumns : kDepth, kRightWidth = kTransposed ? kDepth : kColumns;
  static constexpr int kRightStride = kRightWidth + kPad;
  static constexpr int kStage = kRows * kLeftStride + kRightRows * kRightStride;  // elements
  static constexpr int kSumStride = kColumns + kPad;
  static constexpr int kSumBytes = kRows * kSumStride * static_cast<int>(sizeof(float));
  static constexpr int kOperandBytes = kStages * kStage * static_cast<int>(sizeof(Element));
  static constexpr int kBytes = kOperandBytes > kSumBytes ? kOperandBytes : kSumBytes;

  // Rows from `rows` on lie outside the matrix; what they hold does not matter.
  template <int kHeight, int kWidth>
  static __device__ __forceinline__ void copy(Element* to, const Element* from, int64_t stride, int rows) {
    constexpr int kVectors = kWidth / Elements::kSize;
    static_assert(kHeight * kVectors % kThreads == 0, "each thread copies as much");
#pragma unroll
    for (int turn = 0; turn < kHeight * kVectors / kThreads; ++turn) {
      const int v = turn * kThreads + static_cast<int>(threadIdx.x);
      const int row = v / kVectors, column = v % kVectors * Elements::kSize;
      const Element* const source = from + (row < rows ? row : 0) * stride + column;
      __pipeline_memcpy_async(to + row * (kWidth + kPad) + column, source, sizeof(Elements));
    }
  }

  static __device__ __forceinline__ void fetch(Element* stages, int step, const Element* left, int64_t left_stride,
                                               int rows, const Element* right, int64_t right_stride) {
    Element* const stage = stages + step % kStages * kStage;
    const int64_t depth = int64_t{step} * kDepth;
    copy<kRows, kDepth>(stage, left + depth, left_stride, rows);
    copy<kRightRows, kRightWidth>(stage + kRows * kLeftStride, right + (kTransposed ? depth : depth * right_stride),
                                  right_stride, kRightRows);
  }

  // Sum `steps` * kDepth products for each element of a tile, and leave the sums in shared memory.
  static __device__ __forceinline__ float* multiply(unsigned char* shared, int steps, const Element* left,
                                                    int64_t left_stride, int rows, const Element* right,
                                                    int64_t right_stride) {
    auto* const stages = reinterpret_cast<Element*>(shared);
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const int first_row = warp / 2 * kWarpRows, first_column = warp % 2 * kWarpColumns;
    // These are where this lane's row of four 8 x 8 matrices begins: 16 x 16 elements of each operand.
    const int left_at = (first_row + lane % 16) * kLeftStride + lane / 16 * 8;
    const int right_at = kTransposed ? (first_column + lane / 16 * 8 + lane % 8) * kRightStride + lane / 8 % 2 * 8
                                     : lane % 16 * kRightStride + first_column + lane / 16 * 8;
    float sums[kRowPairs][2 * kColumnPairs][4] = {};
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) {
      if (step < steps) fetch(stages, step, left, left_stride, rows, right, right_stride);
      __pipeline_commit();
    }
    for (int step = 0; step < steps; ++step) {
      __pipeline_wait_prior(kStages - 2);
      __syncthreads();  // all threads' copies have arrived, and no thread still reads the stage that is fetched next
      if (step + kStages - 1 < steps) fetch(stages, step + kStages - 1, left, left_stride, rows, right, right_stride);
      __pipeline_commit();
      const Element* const left_tile = stages + step % kStages * kStage + left_at;
      const Element* const right_tile = stages + step % kStages * kStage + kRows * kLeftStride + right_at;
#pragma unroll
      for (int depth = 0; depth < kDepth; depth += 16) {
        uint32_t a[kRowPairs][4], b[kColumnPairs][4];
#pragma unroll
        for (int i = 0; i < kRowPairs; ++i) load_matrices<false>(a[i], left_tile + i * 16 * kLeftStride + depth);
#pragma unroll
        for (int j = 0; j < kColumnPairs; ++j) {
          const int at = kTransposed ? j * 16 * kRightStride + depth : depth * kRightStride + j * 16;
          load_matrices<!kTransposed>(b[j], right_tile + at);
        }
#pragma unroll
        for (int i = 0; i < kRowPairs; ++i) {
#pragma unroll
          for (int j = 0; j < kColumnPairs; ++j) {
            multiply_add<Element>(sums[i][2 * j], a[i], b[j][0], b[j][1]);
            multiply_add<Element>(sums[i][2 * j + 1], a[i], b[j][2], b[j][3]);
          }
        }
      }
    }
    __pipeline_wait_prior(0);
    __syncthreads();
    auto* const tile = reinterpret_cast<float*>(shared);
    float* const mine = tile + (first_row + lane / 4) * kSumStride + first_column + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kRowPairs; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kColumnPairs; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Vector<float, 2> pair{{sums[i][j][2 * half], sums[i][j][2 * half + 1]}};
          *reinterpret_cast<Vector<float, 2>*>(mine + (i * 16 + half * 8) * kSumStride + j * 8) = pair;
        }
      }
    }
    __syncthreads();
    return tile;
  }
};

using Square = Product<kNsTile, kNsTile, true, 64, 4>;
using Wide = Product<kNsTall, kNsWide, false, 32, 4>;

// Compute out = alpha * sum + beta * addend for neighbouring elements.
__device__ __forceinline__ void combine(float (&sum)[Elements::kSize], float alpha, float beta, const Element* addend,
                                        Element* out) {
  float added[Elements::kSize] = {};
  if (beta != 0.f) load(addend, added);
#pragma unroll
  for (int k = 0; k < Elements::kSize; ++k) sum[k] = alpha * sum[k] + beta * added[k];
  store(out, sum);
}

// With kPolynomial, compute polynomial = b A + c A A from gram = A, else gram = X X'. Both results are symmetric.
template <bool kPolynomial>
__global__ void __launch_bounds__(Square::kThreads) square_product_kernel(const NsParams p, const void* x) {
  extern __shared__ __align__(128) unsigned char shared[];
  const NsTile tile = p.squares[blockIdx.x];
  const NsMatrix matrix = p.matrices[tile.matrix];
  const int64_t height = ns_height(matrix), stride = kPolynomial ? height : ns_width(matrix);
  const Element* const gram = static_cast<const Element*>(p.gram) + matrix.gram;
  const Element* const operand = kPolynomial ? gram : static_cast<const Element*>(x) + matrix.x;
  const int steps = static_cast<int>(ceil_div(kPolynomial ? height : ns_long(matrix), Square::kDepth));
  const int64_t row = int64_t{tile.row} * kNsTile, column = int64_t{tile.column} * kNsTile;
  const float* const sums =
      Square::multiply(shared, steps, operand + row * stride, stride, kNsTile, operand + column * stride, stride);
  Element* const out = static_cast<Element*>(kPolynomial ? p.polynomial : p.gram) + matrix.gram;
  constexpr float kAlpha = kPolynomial ? kNsC : 1.f, kBeta = kPolynomial ? kNsB : 0.f;
  constexpr int kVectors = kNsTile / Elements::kSize;
  for (int v = threadIdx.x; v < kNsTile * kVectors; v += Square::kThreads) {
    const int r = v / kVectors, c = v % kVectors * Elements::kSize;
    float sum[Elements::kSize];
#pragma unroll
    for (int k = 0; k < Elements::kSize; ++k) sum[k] = sums[r * Square::kSumStride + c + k];
    const int64_t at = (row + r) * height + column + c;
    combine(sum, kAlpha, kBeta, gram + at, out + at);
  }
  if (tile.row == tile.column) return;
  for (int v = threadIdx.x; v < kNsTile * kVectors; v += Square::kThreads) {
    const int r = v % kNsTile, c = v / kNsTile * Elements::kSize;
    float sum[Elements::kSize];
#pragma unroll
    for (int k = 0; k < Elements::kSize; ++k) sum[k] = sums[(c + k) * Square::kSumStride + r];
    const int64_t at = (column + r) * height + row + c;
    combine(sum, kAlpha, kBeta, gram + at, out + at);
  }
}

// Compute X <- a X + polynomial X. The last step writes the scaled X to the result.
template <bool kLast>
__global__ void __launch_bounds__(Wide::kThreads, 2) step_kernel(const NsParams p, const void* from, void* to) {
  extern __shared__ __align__(128) unsigned char shared[];
  const NsTile tile = p.tiles[blockIdx.x];
  const NsMatrix matrix = p.matrices[tile.matrix];
  const int64_t height = ns_height(matrix), width = ns_width(matrix);
  const Element* const polynomial = static_cast<const Element*>(p.polynomial) + matrix.gram;
  const Element* const x = static_cast<const Element*>(from) + matrix.x;
  const int64_t row = int64_t{tile.row} * kNsTall, column = int64_t{tile.column} * kNsWide;
  const int rows = static_cast<int>(height - row < kNsTall ? height - row : kNsTall);
  const float* const sums = Wide::multiply(shared, static_cast<int>(height / Wide::kDepth), polynomial + row * height,
                                           height, rows, x + column, width);
  if (!kLast) {
    Element* const out = static_cast<Element*>(to) + matrix.x;
    constexpr int kVectors = kNsWide / Elements::kSize;
    for (int v = threadIdx.x; v < rows * kVectors; v += Wide::kThreads) {
      const int r = v / kVectors, c = v % kVectors * Elements::kSize;
      float sum[Elements::kSize];
#pragma unroll
      for (int k = 0; k < Elements::kSize; ++k) sum[k] = sums[r * Wide::kSumStride + c + k];
      const int64_t at = (row + r) * width + column + c;
      combine(sum, 1.f, kNsA, x + at, out + at);
    }
    return;
  }
  const bool transposed = matrix.rows > matrix.columns;
  float* const result = p.result + matrix.source;
  for (int e = threadIdx.x; e < kNsTall * kNsWide; e += Wide::kThreads) {
    const int r = transposed ? e % kNsTall : e / kNsWide, c = transposed ? e / kNsTall : e % kNsWide;
    const int64_t i = row + r, j = column + c;
    if (i >= ns_short(matrix) || j >= ns_long(matrix)) continue;
    const float value = sums[r * Wide::kSumStride + c] + kNsA * to_arithmetic(x[i * width + j]);
    result[transposed ? j * matrix.columns + i : i * matrix.columns + j] =
        Storage<Element>::round(value) * matrix.scale;
  }
}

}  // namespace

cudaError_t prepare_newton_schulz() {
  for (const void* kernel : {reinterpret_cast<const void*>(square_product_kernel<false>),
                             reinterpret_cast<const void*>(square_product_kernel<true>)}) {
    if (const cudaError_t error = allow_shared(kernel, Square::kBytes)) return error;
  }
  for (const void* kernel :
       {reinterpret_cast<const void*>(step_kernel<false>), reinterpret_cast<const void*>(step_kernel<true>)}) {
    if (const cudaError_t error = allow_shared(kernel, Wide::kBytes)) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_newton_schulz(const NsParams& p, cudaStream_t stream) {
  if (p.num_tiles == 0) return cudaSuccess;
  if (p.num_chunks > INT_MAX || p.num_squares > INT_MAX || p.num_tiles > INT_MAX) return cudaErrorInvalidValue;
  const auto chunks = static_cast<unsigned>(p.num_chunks), squares = static_cast<unsigned>(p.num_squares);
  const auto tiles = static_cast<unsigned>(p.num_tiles);
  square_kernel<<<chunks, kPlainThreads, 0, stream>>>(p);
  normalize_kernel<<<tiles, kPlainThreads, 0, stream>>>(p);
  for (int step = 0; step < kNsSteps; ++step) {
    const void* const from = p.x[step % 2];
    void* const to = p.x[1 - step % 2];
    square_product_kernel<false><<<squares, Square::kThreads, Square::kBytes, stream>>>(p, from);
    square_product_kernel<true><<<squares, Square::kThreads, Square::kBytes, stream>>>(p, from);
    if (step + 1 < kNsSteps) {
      step_kernel<false><<<tiles, Wide::kThreads, Wide::kBytes, stream>>>(p, from, to);
    } else {
      step_kernel<true><<<tiles, Wide::kThreads, Wide::kBytes, stream>>>(p, from, to);
    }
  }
  return cudaGetLastError();
}

}  // namespace torch_fastdet::core
