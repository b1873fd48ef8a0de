// The kernels gather the value's pixels from L2. They sum its gradients as integers, which give the same sum in any
// order: a bound on the sum determines the power of two that is their unit.
#include "core/deformable_attention/deformable_attention.h"

#include <algorithm>
#include <type_traits>

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/common/fast_divider.h"
#include "core/deformable_attention/deformable_attention_math.h"

namespace torch_fastdet::core {
namespace {

constexpr int kThreads = 128;
constexpr int kVector = 8;  // channels per thread
constexpr int kMostVectorChannels = kVector * kWarp;
constexpr int kValueThreads = 512;
constexpr int kTileBytes = 100 << 10;  // for sums; twice as much fits in two blocks on one multiprocessor of an H100
constexpr int kReserve = 3 << 10;      // shared memory of a block apart from its sums
constexpr int kLeastTiles = 4;         // per level, so that blocks have similar amounts of work
constexpr int kTogether = 4;           // gradients that a warp loads before adding them

// These lanes share a query and head. `heads` divides a thread's number.
struct Rows {
  int lane_bits;
  int count;  // rows per image
  FastDivider heads;
};

Rows make_rows(const DeformableAttentionParams& p, bool vectors) {
  Rows rows{};
  const int pieces = vectors ? p.channels / kVector : p.channels;
  while (rows.lane_bits < 5 && 1 << rows.lane_bits < pieces) ++rows.lane_bits;
  rows.count = static_cast<int>(int64_t{p.queries} * p.heads);
  rows.heads = FastDivider(static_cast<uint32_t>(p.heads));
  return rows;
}

// With kFast, a lane has kVector neighbouring channels. Otherwise it has the channels equal to it modulo the lanes.
template <typename T, bool kFast>
using Channels = Vector<T, kFast ? kVector : 1>;

template <typename T, bool kFast>
__global__ void __launch_bounds__(kThreads)
    deformable_forward(const __grid_constant__ DeformableAttentionParams p, const __grid_constant__ Rows rows) {
  using A = arithmetic_t<T>;
  using Piece = Channels<T, kFast>;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int lanes = 1 << rows.lane_bits, lane = static_cast<int>(thread) & (lanes - 1);
  const int row = static_cast<int>(thread >> rows.lane_bits);
  if (row >= rows.count) return;
  uint32_t query = row;
  const int head = static_cast<int>(rows.heads.divide(query));
  const int pieces = p.channels / Piece::kSize, pixel = p.heads * pieces, points = p.level_count * p.points;
  for (int64_t image = blockIdx.y; image < p.batch; image += gridDim.y) {
    const int64_t at = image * rows.count + row;
    const Vector<A, 2>* const locations = static_cast<const Vector<A, 2>*>(p.locations) + at * points;
    const A* const weights = static_cast<const A*>(p.weights) + at * points;
    const Piece* const value = static_cast<const Piece*>(p.value) + image * p.pixels * pixel + head * pieces;
    for (int piece = lane; piece < pieces; piece += lanes) {
      A sums[Piece::kSize] = {};
      for (int l = 0; l < p.level_count; ++l) {
        const DeformableLevel level = p.levels[l];
        const Piece* const base = value + level.first * pixel + piece;
#pragma unroll 4
        for (int i = l * p.points; i < (l + 1) * p.points; ++i) {
          const Vector<A, 2> place = locations[i];
          const A weight = weights[i];
          const DeformableTap<A> tap = deformable_tap(place.x[0], place.x[1], level.width, level.height);
#pragma unroll
          for (int corner = 0; corner < 4; ++corner) {
            const int x = tap.corner_x(corner), y = tap.corner_y(corner);
            if (!deformable_inside(x, y, level.width, level.height)) continue;
            const Piece values = base[(y * level.width + x) * pixel];
            const A factor = weight * tap.share(corner);
#pragma unroll
            for (int c = 0; c < Piece::kSize; ++c) sums[c] += factor * to_arithmetic(values.x[c]);
          }
        }
      }
      Piece out;
#pragma unroll
      for (int c = 0; c < Piece::kSize; ++c) out.x[c] = from_arithmetic<T>(sums[c]);
      static_cast<Piece*>(p.out)[at * pieces + piece] = out;
    }
  }
}

// Compute gradients of locations and weights, and for each query and head a bound on its part of the value's gradient.
template <typename T, bool kFast>
__global__ void __launch_bounds__(kThreads)
    deformable_backward_points(const __grid_constant__ DeformableAttentionBackwardParams b,
                               const __grid_constant__ Rows rows) {
  using A = arithmetic_t<T>;
  using Piece = Channels<T, kFast>;
  const DeformableAttentionParams& p = b.forward;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int lanes = 1 << rows.lane_bits, lane = static_cast<int>(thread) & (lanes - 1);
  // Keep a warp's lanes together: those past the last row repeat it.
  const bool exists = thread >> rows.lane_bits < rows.count;
  const int row = exists ? static_cast<int>(thread >> rows.lane_bits) : rows.count - 1;
  uint32_t query = row;
  const int head = static_cast<int>(rows.heads.divide(query));
  const int pieces = p.channels / Piece::kSize, pixel = p.heads * pieces, points = p.level_count * p.points;
  for (int64_t image = blockIdx.y; image < p.batch; image += gridDim.y) {
    const int64_t at = image * rows.count + row;
    const Piece* const grad = static_cast<const Piece*>(b.grad) + at * pieces;
    const Piece* const value = static_cast<const Piece*>(p.value) + image * p.pixels * pixel + head * pieces;
    A own[Piece::kSize] = {};  // kFast: the lane's only piece of the gradient
    A most = 0, sum = 0;
    for (int piece = lane; piece < pieces; piece += lanes) {
      const Piece values = grad[piece];
#pragma unroll
      for (int c = 0; c < Piece::kSize; ++c) {
        own[c] = to_arithmetic(values.x[c]);
        most = own[c] == own[c] ? fmax(most, fabs(own[c])) : A(INFINITY);
      }
    }
    for (int l = 0; l < p.level_count; ++l) {
      const DeformableLevel level = p.levels[l];
      const Piece* const base = value + level.first * pixel;
#pragma unroll 4
      for (int i = l * p.points; i < (l + 1) * p.points; ++i) {
        const Vector<A, 2> place = static_cast<const Vector<A, 2>*>(p.locations)[at * points + i];
        const A weight = static_cast<const A*>(p.weights)[at * points + i];
        sum += fabs(weight);
        const DeformableTap<A> tap = deformable_tap(place.x[0], place.x[1], level.width, level.height);
        A products[4] = {};
        for (int piece = lane; piece < pieces; piece += lanes) {
          if constexpr (!kFast) own[0] = to_arithmetic(grad[piece].x[0]);
#pragma unroll
          for (int corner = 0; corner < 4; ++corner) {
            const int x = tap.corner_x(corner), y = tap.corner_y(corner);
            if (!deformable_inside(x, y, level.width, level.height)) continue;
            const Piece values = base[(y * level.width + x) * pixel + piece];
#pragma unroll
            for (int c = 0; c < Piece::kSize; ++c) products[corner] += own[c] * to_arithmetic(values.x[c]);
          }
          if constexpr (kFast) break;
        }
        DeformableGradients<A> gradients = deformable_gradients(tap, products, weight, level.width, level.height);
        for (int step = 1; step < lanes; step *= 2) {
          gradients.weight += __shfl_xor_sync(kFullWarp, gradients.weight, step);
          gradients.x += __shfl_xor_sync(kFullWarp, gradients.x, step);
          gradients.y += __shfl_xor_sync(kFullWarp, gradients.y, step);
        }
        if (lane == 0 && exists) {
          static_cast<A*>(b.grad_weights)[at * points + i] = gradients.weight;
          static_cast<Vector<A, 2>*>(b.grad_locations)[at * points + i] = {gradients.x, gradients.y};
        }
      }
    }
    for (int step = 1; step < lanes; step *= 2) most = fmax(most, __shfl_xor_sync(kFullWarp, most, step));
    if (lane == 0 && exists) static_cast<A*>(b.bounds)[(image * p.heads + head) * p.queries + query] = most * sum;
  }
}

// A tile is a rectangle of as many pixels as fit in a block. The last level's tiles come first: it is the smallest, so
// that each of its tiles has the most points. A tile has a block for each image, 32 channels and head.
struct Tiles {
  int first[kMostDeformableLevels + 1];
  int width[kMostDeformableLevels], height[kMostDeformableLevels];
  int chunks;  // chunks of channels
  FastDivider points;
};

Tiles make_tiles(const DeformableAttentionParams& p, int most) {
  Tiles tiles{};
  for (int l = 0; l < p.level_count; ++l) {
    const DeformableLevel& level = p.levels[l];
    const int pixels =
        static_cast<int>(std::min<int64_t>(most, ceil_div(int64_t{level.height} * level.width, kLeastTiles)));
    const int columns = static_cast<int>(ceil_div(level.width, pixels));
    tiles.width[l] = static_cast<int>(ceil_div(level.width, columns));
    const int rows = static_cast<int>(ceil_div(level.height, pixels / tiles.width[l]));
    tiles.height[l] = static_cast<int>(ceil_div(level.height, rows));
    tiles.first[l + 1] = tiles.first[l] + static_cast<int>(ceil_div(level.width, tiles.width[l]) *
                                                           ceil_div(level.height, tiles.height[l]));
  }
  tiles.chunks = static_cast<int>(ceil_div(p.channels, kWarp));
  tiles.points = FastDivider(static_cast<uint32_t>(std::max(p.points, 1)));
  return tiles;
}

__device__ __forceinline__ int least(int a, int b) {
  return a < b ? a : b;
}

// A sum has this many bits besides the sign. One more bit is left for the rounding of the bound.
template <typename Sum>
constexpr int kBits = sizeof(Sum) == 4 ? 30 : 61;

__device__ __forceinline__ int to_integer(float x, int) {
  return __float2int_rn(x);
}
__device__ __forceinline__ unsigned long long to_integer(float x, unsigned long long) {
  return static_cast<unsigned long long>(__float2ll_rn(x));
}
__device__ __forceinline__ unsigned long long to_integer(double x, unsigned long long) {
  return static_cast<unsigned long long>(__double2ll_rn(x));
}
__device__ __forceinline__ int to_signed(int x) {
  return x;
}
__device__ __forceinline__ long long to_signed(unsigned long long x) {
  return static_cast<long long>(x);
}

// A block computes a tile of a level of one image and head for 32 channels. Its warps go through the level's points.
// The whole warp adds a point that touches the tile, with one channel per lane.
template <typename T, typename Sum, bool kFast>
__global__ void __launch_bounds__(kValueThreads)
    deformable_backward_value(const __grid_constant__ DeformableAttentionBackwardParams b,
                              const __grid_constant__ Tiles tiles) {
  using A = arithmetic_t<T>;
  constexpr int kClear = 16 / sizeof(Sum);
  extern __shared__ __align__(16) unsigned char room[];
  Sum* const sums = reinterpret_cast<Sum*>(room);
  __shared__ A total;
  const DeformableAttentionParams& p = b.forward;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  unsigned rest = blockIdx.x;
  const int head = static_cast<int>(rest % p.heads);
  rest /= p.heads;
  const int channel = static_cast<int>(rest % tiles.chunks) * kWarp;
  rest /= tiles.chunks;
  const int64_t image = rest % static_cast<unsigned>(p.batch);
  int tile = tiles.first[p.level_count] - 1 - static_cast<int>(rest / static_cast<unsigned>(p.batch));
  int l = 0;
  while (tile >= tiles.first[l + 1]) ++l;
  tile -= tiles.first[l];
  const DeformableLevel level = p.levels[l];
  const int columns = (level.width + tiles.width[l] - 1) / tiles.width[l];
  const int left = tile % columns * tiles.width[l], top = tile / columns * tiles.height[l];
  const int width = least(tiles.width[l], level.width - left), height = least(tiles.height[l], level.height - top);

  for (int i = threadIdx.x; i < width * height * kWarp / kClear; i += kValueThreads) {
    reinterpret_cast<Vector<Sum>*>(sums)[i] = {};
  }
  A bound[1] = {};
  const A* const bounds = static_cast<const A*>(b.bounds) + (image * p.heads + head) * p.queries;
  for (int i = threadIdx.x; i < p.queries; i += kValueThreads) bound[0] += bounds[i];
  block_sum<kValueThreads>(bound);
  if (threadIdx.x == 0) total = bound[0];
  __syncthreads();
  const bool finite = total < A(INFINITY);
  const int most = sizeof(A) == 8 ? 1000 : 126;
  const int exponent = total > 0 && finite ? least(most, kBits<Sum> - 1 - ilogb(total)) : 0;
  const A scale = ldexp(A(1), exponent);

  const int count = finite ? p.queries * p.points : 0, points = p.level_count * p.points;
  const int64_t rows = image * p.queries;
  const T* const grads = static_cast<const T*>(b.grad) + channel + lane;
  const bool has_channel = channel + lane < p.channels;
  for (int first = warp * kWarp; first < count; first += kValueThreads) {
    const int i = first + lane;
    uint32_t query = least(i, count - 1);
    const int point = static_cast<int>(tiles.points.divide(query));
    const int64_t row = (rows + query) * p.heads + head, at = row * points + l * p.points + point;
    const Vector<A, 2> place = static_cast<const Vector<A, 2>*>(p.locations)[at];
    const A weight = static_cast<const A*>(p.weights)[at] * scale;
    DeformableTap<A> tap = deformable_tap(place.x[0], place.x[1], level.width, level.height);
    tap.x -= left;
    tap.y -= top;
    unsigned found =
        __ballot_sync(kFullWarp, i < count && tap.x >= -1 && tap.y >= -1 && tap.x < width && tap.y < height);
    while (found) {
      int source[kTogether];
      A grad[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        source[k] = __ffs(static_cast<int>(found)) - 1;
        found &= found - 1;
        const int64_t from = (rows + __shfl_sync(kFullWarp, query, source[k])) * p.heads + head;
        grad[k] = source[k] >= 0 && has_channel ? to_arithmetic(grads[from * p.channels]) : A(0);
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (source[k] < 0) break;
        const DeformableTap<A> other{__shfl_sync(kFullWarp, tap.x, source[k]), __shfl_sync(kFullWarp, tap.y, source[k]),
                                     __shfl_sync(kFullWarp, tap.right, source[k]),
                                     __shfl_sync(kFullWarp, tap.down, source[k])};
        const A factor = grad[k] * __shfl_sync(kFullWarp, weight, source[k]);
#pragma unroll
        for (int corner = 0; corner < 4; ++corner) {
          const int x = other.corner_x(corner), y = other.corner_y(corner);
          if (!deformable_inside(x, y, width, height)) continue;
          atomicAdd(sums + (y * width + x) * kWarp + lane, to_integer(factor * other.share(corner), Sum(0)));
        }
      }
    }
  }
  __syncthreads();
  const A unit = ldexp(A(1), -exponent);
  using Piece = Channels<T, kFast>;
  constexpr int kPieces = kWarp / Piece::kSize;
  for (int i = threadIdx.x; i < width * height * kPieces; i += kValueThreads) {
    const int c = i % kPieces * Piece::kSize, pixel = i / kPieces;
    if (channel + c >= p.channels) continue;
    Piece out;
#pragma unroll
    for (int k = 0; k < Piece::kSize; ++k) {
      const A value = static_cast<A>(to_signed(sums[pixel * kWarp + c + k])) * unit;
      out.x[k] = from_arithmetic<T>(finite ? value : A(NAN));
    }
    const int y = top + pixel / width, x = left + pixel % width;
    const int64_t place = (image * p.pixels + level.first + y * level.width + x) * p.heads + head;
    *reinterpret_cast<Piece*>(static_cast<T*>(b.grad_value) + place * p.channels + channel + c) = out;
  }
}

dim3 point_blocks(const DeformableAttentionParams& p, const Rows& rows) {
  const int64_t threads = int64_t{rows.count} << rows.lane_bits;
  return dim3(static_cast<unsigned>(ceil_div(threads, kThreads)),
              static_cast<unsigned>(std::min<int64_t>(p.batch, 65535)));
}

bool has_vectors(const DeformableAttentionParams& p) {
  return p.channels % kVector == 0 && p.channels <= kMostVectorChannels;
}

template <typename T, bool kFast>
cudaError_t launch_value(const DeformableAttentionBackwardParams& b, cudaStream_t stream) {
  using Sum = std::conditional_t<sizeof(T) == 2, int, unsigned long long>;
  const DeformableAttentionParams& p = b.forward;
  int device = 0, shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  if (error != cudaSuccess) return error;
  constexpr int kPixel = kWarp * sizeof(Sum);
  const Tiles tiles = make_tiles(p, std::min(kTileBytes, shared / 2 - kReserve) / kPixel);
  const int64_t blocks = int64_t{tiles.first[p.level_count]} * tiles.chunks * p.heads * p.batch;
  if (blocks > (int64_t{1} << 31) - 1) return cudaErrorInvalidConfiguration;
  int bytes = 0;
  for (int l = 0; l < p.level_count; ++l) bytes = std::max(bytes, tiles.width[l] * tiles.height[l] * kPixel);
  error = allow_shared(deformable_backward_value<T, Sum, kFast>, kTileBytes);
  if (error != cudaSuccess) return error;
  deformable_backward_value<T, Sum, kFast><<<static_cast<unsigned>(blocks), kValueThreads, bytes, stream>>>(b, tiles);
  return cudaGetLastError();
}

template <typename T, bool kFast>
cudaError_t launch_backward(const DeformableAttentionBackwardParams& b, cudaStream_t stream) {
  const Rows rows = make_rows(b.forward, kFast);
  if (rows.count > 0 && b.forward.batch > 0) {
    deformable_backward_points<T, kFast><<<point_blocks(b.forward, rows), kThreads, 0, stream>>>(b, rows);
    if (const cudaError_t error = cudaGetLastError()) return error;
  }
  return launch_value<T, kFast>(b, stream);
}

}  // namespace

cudaError_t launch_deformable_attention(const DeformableAttentionParams& params, cudaStream_t stream) {
  const bool vectors = has_vectors(params);
  const Rows rows = make_rows(params, vectors);
  return dispatch(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    const dim3 blocks = point_blocks(params, rows);
    if (vectors) {
      deformable_forward<T, true><<<blocks, kThreads, 0, stream>>>(params, rows);
    } else {
      deformable_forward<T, false><<<blocks, kThreads, 0, stream>>>(params, rows);
    }
    return cudaGetLastError();
  });
}

cudaError_t launch_deformable_attention_backward(const DeformableAttentionBackwardParams& params, cudaStream_t stream) {
  return dispatch(params.forward.dtype, [&](auto zero) {
    using T = decltype(zero);
    return has_vectors(params.forward) ? launch_backward<T, true>(params, stream)
                                       : launch_backward<T, false>(params, stream);
  });
}

}  // namespace torch_fastdet::core
