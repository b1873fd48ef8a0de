// The kernels of upsample.h are bound by memory: they keep several coalesced 16-byte accesses in flight.
#include "core/upsample/upsample.h"

#include <cstring>
#include <type_traits>

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/common/fast_divider.h"

namespace torch_fastdet::core {
namespace {

// Threads of a block, accesses of a thread that are in flight together, and bytes of an access to the small tensor in
// NCHW (8, so that one 16-byte store writes the doubled elements) were chosen by measurements on an H200.
constexpr int kThreads = 512;
constexpr int kNhwcThreads = 1024;  // forward only
constexpr int kNhwcUnroll = 1;
constexpr int kNchwUnroll = 2;
constexpr int kCopyUnroll = 4;
constexpr int kBackwardUnroll = 1;
constexpr int kNchwBytes = 8;
constexpr int64_t kMaxAccesses = int64_t{1} << 29;  // of a launch; FastDivider takes indices up to twice this

template <int kBytes>
struct Raw;
template <>
struct Raw<2> {
  using type = unsigned short;
};
template <>
struct Raw<4> {
  using type = unsigned int;
};
template <>
struct Raw<8> {
  using type = uint2;
};
template <>
struct Raw<16> {
  using type = uint4;
};
template <int kBytes>
using raw_t = typename Raw<kBytes>::type;

// Map an index of a plan's block to byte offsets into two tensors. A row of a has kRows rows of b; i2 counts b's.
struct Walk {
  FastDivider accesses, extent2, extent1;
  uint32_t count;
  int64_t a_stride[3], b_stride[3];  // in bytes
  int32_t a_access, b_access;        // bytes from one access to the next

  template <int kRows>
  __device__ __forceinline__ void offsets(uint32_t index, int64_t& a, int64_t& b) const {
    const int64_t access = accesses.divide(index);
    const int64_t i2 = extent2.divide(index);
    const int64_t i1 = extent1.divide(index);
    a = index * a_stride[0] + i1 * a_stride[1] + i2 / kRows * a_stride[2] + access * a_access;
    b = index * b_stride[0] + i1 * b_stride[1] + i2 * b_stride[2] + access * b_access;
  }
};

template <int kBytes>
__device__ __forceinline__ raw_t<kBytes> load(const char* address) {
  return __ldg(reinterpret_cast<const raw_t<kBytes>*>(address));
}

// Use streaming stores: in training the output is larger than L2, and these evict less of what is read.
template <int kBytes>
__device__ __forceinline__ void store(char* address, raw_t<kBytes> value) {
  __stcs(reinterpret_cast<raw_t<kBytes>*>(address), value);
}

// Each thread loads kUnroll accesses and then stores them. `block` is the index within this part of the grid.
template <int kBlock, int kUnroll, int kBytes, int kRows, typename Store>
__device__ __forceinline__ void load_then_store(const Walk& walk, uint32_t block, const char* source, char* target,
                                                Store store_one) {
  raw_t<kBytes> values[kUnroll];
  int64_t to[kUnroll];
  const uint32_t first = block * (kBlock * kUnroll) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t index = first + u * kBlock;
    if (index < walk.count) {
      int64_t from;
      walk.offsets<kRows>(index, from, to[u]);
      values[u] = load<kBytes>(source + from);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kBlock < walk.count) store_one(target + to[u], values[u]);
  }
}

template <int kBlock, int kBytes>
__device__ __forceinline__ void copy_block(const Walk& walk, uint32_t block, const char* source, char* target) {
  load_then_store<kBlock, kCopyUnroll, kBytes, 1>(walk, block, source, target,
                                                  [](char* to, raw_t<kBytes> value) { store<kBytes>(to, value); });
}

struct ForwardLaunch {
  Walk up;  // a = x, b = out
  const char* x;
  char* out;
  int64_t row, col;  // bytes from an element of out to the one below it, and (channels_last) to its right neighbour
  uint32_t up_blocks;
  Walk copy;  // a = skip, b = out
  const char* skip;
  char* skip_out;
  int copy_bytes;
};

// The blocks after up_blocks copy skip.
template <int kBlock>
__device__ __forceinline__ void copy_part(const ForwardLaunch& p) {
  const uint32_t block = blockIdx.x - p.up_blocks;
  switch (p.copy_bytes) {
    case 16:
      return copy_block<kBlock, 16>(p.copy, block, p.skip, p.skip_out);
    case 8:
      return copy_block<kBlock, 8>(p.copy, block, p.skip, p.skip_out);
    case 4:
      return copy_block<kBlock, 4>(p.copy, block, p.skip, p.skip_out);
    default:
      return copy_block<kBlock, 2>(p.copy, block, p.skip, p.skip_out);
  }
}

// For channels_last, a thread loads kBytes of channels once and stores them four times.
template <int kBytes>
__global__ void __launch_bounds__(kNhwcThreads) upsample_nhwc(const __grid_constant__ ForwardLaunch p) {
  if (blockIdx.x >= p.up_blocks) return copy_part<kNhwcThreads>(p);
  const auto store_square = [&p](char* to, raw_t<kBytes> value) {
    store<kBytes>(to, value);
    store<kBytes>(to + p.col, value);
    store<kBytes>(to + p.row, value);
    store<kBytes>(to + p.row + p.col, value);
  };
  load_then_store<kNhwcThreads, kNhwcUnroll, kBytes, 1>(p.up, blockIdx.x, p.x, p.out, store_square);
}

// A thread loads kSmall elements and writes each twice, kLarge elements a store. Threads follow the rows of out, so a
// row of x is read twice. The second read hits L1 or L2 and costs less than stores that straddle 32-byte sectors of two
// rows.
template <typename Element, int kSmall, int kLarge>
__global__ void __launch_bounds__(kThreads) upsample_nchw(const __grid_constant__ ForwardLaunch p) {
  if (blockIdx.x >= p.up_blocks) return copy_part<kThreads>(p);
  constexpr int kBytes = kSmall * sizeof(Element);
  constexpr int kStoreBytes = kLarge * sizeof(Element);
  constexpr int kStores = 2 * kSmall / kLarge;
  const auto store_row = [](char* to, raw_t<kBytes> value) {
    Element in[kSmall];
    Element doubled[2 * kSmall];
    raw_t<kStoreBytes> out[kStores];
    memcpy(in, &value, sizeof(in));
#pragma unroll
    for (int i = 0; i < kSmall; ++i) {
      doubled[2 * i] = in[i];
      doubled[2 * i + 1] = in[i];
    }
    memcpy(out, doubled, sizeof(out));
#pragma unroll
    for (int i = 0; i < kStores; ++i) store<kStoreBytes>(to + i * kStoreBytes, out[i]);
  };
  load_then_store<kThreads, kNchwUnroll, kBytes, 2>(p.up, blockIdx.x, p.x, p.out, store_row);
}

struct BackwardLaunch {
  Walk walk;  // a = grad_x, b = grad_out
  const char* grad_out;
  char* grad_x;
  int64_t row, col;  // in grad_out, bytes
};

template <typename T>
__device__ __forceinline__ T sum_square(T top_left, T top_right, T bottom_left, T bottom_right) {
  return from_arithmetic<T>(to_arithmetic(top_left) + to_arithmetic(top_right) + to_arithmetic(bottom_left) +
                            to_arithmetic(bottom_right));
}

// Read kLoads accesses a thread with load_squares(address in grad_out, out), and store kSmall results sum_of(out, i).
template <typename T, int kSmall, int kLoadBytes, int kLoads, typename Load, typename Sum>
__device__ __forceinline__ void sum_squares(const BackwardLaunch& p, Load load_squares, Sum sum_of) {
  constexpr int kBytes = kSmall * sizeof(T);
  raw_t<kLoadBytes> squares[kBackwardUnroll][kLoads];
  int64_t to[kBackwardUnroll];
  const uint32_t first = blockIdx.x * (kThreads * kBackwardUnroll) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kBackwardUnroll; ++u) {
    const uint32_t index = first + u * kThreads;
    if (index < p.walk.count) {
      int64_t from;
      p.walk.offsets<1>(index, to[u], from);
      load_squares(p.grad_out + from, squares[u]);
    }
  }
#pragma unroll
  for (int u = 0; u < kBackwardUnroll; ++u) {
    if (first + u * kThreads < p.walk.count) {
      T square[4 * kSmall];
      T sums[kSmall];
      memcpy(square, squares[u], sizeof(square));
#pragma unroll
      for (int i = 0; i < kSmall; ++i) sums[i] = sum_of(square, i);
      raw_t<kBytes> out;
      memcpy(&out, sums, sizeof(out));
      store<kBytes>(p.grad_x + to[u], out);
    }
  }
}

template <typename T, int kSmall>
__global__ void __launch_bounds__(kThreads) upsample_backward_nhwc(const __grid_constant__ BackwardLaunch p) {
  constexpr int kBytes = kSmall * sizeof(T);
  const auto load_squares = [&p](const char* grad, raw_t<kBytes>(&squares)[4]) {
    squares[0] = load<kBytes>(grad);
    squares[1] = load<kBytes>(grad + p.col);
    squares[2] = load<kBytes>(grad + p.row);
    squares[3] = load<kBytes>(grad + p.row + p.col);
  };
  sum_squares<T, kSmall, kBytes, 4>(p, load_squares, [](const T* square, int i) {
    return sum_square(square[i], square[kSmall + i], square[2 * kSmall + i], square[3 * kSmall + i]);
  });
}

template <typename T, int kSmall, int kLarge>
__global__ void __launch_bounds__(kThreads) upsample_backward_nchw(const __grid_constant__ BackwardLaunch p) {
  constexpr int kBytes = kLarge * sizeof(T), kLoads = 2 * kSmall / kLarge;
  const auto load_rows = [&p](const char* grad, raw_t<kBytes>(&rows)[2 * kLoads]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      rows[i] = load<kBytes>(grad + i * kBytes);
      rows[kLoads + i] = load<kBytes>(grad + p.row + i * kBytes);
    }
  };
  sum_squares<T, kSmall, kBytes, 2 * kLoads>(p, load_rows, [](const T* top, int i) {
    const T* bottom = top + 2 * kSmall;
    return sum_square(top[2 * i], top[2 * i + 1], bottom[2 * i], bottom[2 * i + 1]);
  });
}

// Hold a plan's block for a kernel: byte offsets and the walk. `rows` is its kRows, `row` the bytes between rows.
struct Piece {
  Walk walk;
  int64_t a_offset, b_offset;
};

Piece make_piece(const IndexBlocks& blocks, int64_t k, const int64_t a_stride[3], const int64_t b_stride[3],
                 int a_access, int b_access, int itemsize, int rows = 1, int64_t row = 0) {
  int64_t begin[4], size[4];
  blocks.get(k, begin, size);
  Piece piece{};
  piece.walk.count = static_cast<uint32_t>(size[0] * size[1] * size[2] * size[3] * rows);
  piece.walk.accesses = FastDivider(static_cast<uint32_t>(size[3]));
  piece.walk.extent2 = FastDivider(static_cast<uint32_t>(size[2] * rows));
  piece.walk.extent1 = FastDivider(static_cast<uint32_t>(size[1]));
  piece.walk.a_access = a_access;
  piece.walk.b_access = b_access;
  piece.a_offset = begin[3] * a_access;
  piece.b_offset = begin[3] * b_access;
  for (int i = 0; i < 3; ++i) {
    piece.walk.a_stride[i] = a_stride[i] * itemsize;
    piece.walk.b_stride[i] = b_stride[i] * itemsize;
    piece.a_offset += begin[i] * piece.walk.a_stride[i];
    piece.b_offset += begin[i] * piece.walk.b_stride[i];
  }
  if (rows > 1) piece.walk.b_stride[2] = row;
  return piece;
}

uint32_t blocks_of(const Walk& walk, int threads, int unroll) {
  return static_cast<uint32_t>(ceil_div(walk.count, threads * unroll));
}

IndexBlocks index_blocks(const int64_t extent[3], int64_t accesses) {
  return IndexBlocks(extent[0], extent[1], extent[2], accesses, kMaxAccesses);
}

// Call f(small, large) with the widths of `vector` as compile-time constants.
template <int kItemsize, int kSmall = kNchwBytes / kItemsize, typename F>
void dispatch_nchw(UpsampleVector vector, F&& f) {
  constexpr int kLarge = 2 * kSmall * kItemsize > 16 ? 16 / kItemsize : 2 * kSmall;
  if constexpr (kSmall > 1) {
    if (vector.small < kSmall) return dispatch_nchw<kItemsize, kSmall / 2>(vector, f);
  } else if (vector.large == 1) {
    return f(std::integral_constant<int, 1>{}, std::integral_constant<int, 1>{});
  }
  f(std::integral_constant<int, kSmall>{}, std::integral_constant<int, kLarge>{});
}

template <int kWidest, typename F>
void dispatch_nhwc(int width, F&& f) {
  if constexpr (kWidest > 1) {
    if (width < kWidest) return dispatch_nhwc<kWidest / 2>(width, f);
  }
  f(std::integral_constant<int, kWidest>{});
}

void run_forward(bool channels_last, UpsampleVector vector, int itemsize, const ForwardLaunch& launch, uint32_t grid,
                 cudaStream_t stream) {
  if (channels_last) {
    dispatch_nhwc<8>(vector.small * itemsize / 2, [&](auto halves) {
      upsample_nhwc<2 * decltype(halves)::value><<<grid, kNhwcThreads, 0, stream>>>(launch);
    });
    return;
  }
  const auto run = [&](auto element) {
    using Element = decltype(element);
    dispatch_nchw<sizeof(Element)>(vector, [&](auto small, auto large) {
      upsample_nchw<Element, decltype(small)::value, decltype(large)::value><<<grid, kThreads, 0, stream>>>(launch);
    });
  };
  itemsize == 2 ? run(uint16_t{}) : itemsize == 4 ? run(uint32_t{}) : run(uint64_t{});
}

}  // namespace

cudaError_t launch_upsample_forward(const UpsampleForwardParams& params, cudaStream_t stream) {
  const UpsamplePlan& plan = params.plan;
  const CopyPlan& copy = params.copy;
  const int itemsize = params.itemsize;
  const UpsampleVector vector =
      upsample_vector(plan, reinterpret_cast<uintptr_t>(params.x), reinterpret_cast<uintptr_t>(params.out), itemsize,
                      plan.channels_last ? 16 : kNchwBytes);
  const IndexBlocks up = index_blocks(plan.extent, plan.inner / vector.small);

  ForwardLaunch launch{};
  launch.row = plan.large_row * itemsize;
  launch.col = plan.large_col * itemsize;
  launch.copy_bytes = copy_access_bytes(copy, reinterpret_cast<uintptr_t>(params.skip),
                                        reinterpret_cast<uintptr_t>(params.skip_out), itemsize);
  const IndexBlocks copies = index_blocks(copy.extent, copy.inner * itemsize / launch.copy_bytes);

  for (int64_t k = 0; k < up.count() || k < copies.count(); ++k) {
    launch.up_blocks = 0;
    uint32_t grid = 0;
    if (k < up.count()) {
      const int access = vector.small * itemsize;
      const Piece piece =
          make_piece(up, k, plan.small_stride, plan.large_stride, access, plan.channels_last ? access : 2 * access,
                     itemsize, plan.channels_last ? 1 : 2, launch.row);
      launch.up = piece.walk;
      launch.x = static_cast<const char*>(params.x) + piece.a_offset;
      launch.out = static_cast<char*>(params.out) + piece.b_offset;
      launch.up_blocks = blocks_of(piece.walk, plan.channels_last ? kNhwcThreads : kThreads,
                                   plan.channels_last ? kNhwcUnroll : kNchwUnroll);
      grid = launch.up_blocks;
    }
    if (k < copies.count()) {
      const Piece piece =
          make_piece(copies, k, copy.src_stride, copy.dst_stride, launch.copy_bytes, launch.copy_bytes, itemsize);
      launch.copy = piece.walk;
      launch.skip = static_cast<const char*>(params.skip) + piece.a_offset;
      launch.skip_out = static_cast<char*>(params.skip_out) + piece.b_offset;
      grid += blocks_of(piece.walk, plan.channels_last ? kNhwcThreads : kThreads, kCopyUnroll);
    }
    run_forward(plan.channels_last, vector, itemsize, launch, grid, stream);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_upsample_backward(const UpsampleBackwardParams& params, cudaStream_t stream) {
  const UpsamplePlan& plan = params.plan;
  cudaError_t error = cudaSuccess;
  dispatch(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kItemsize = sizeof(T);
    const UpsampleVector vector =
        upsample_vector(plan, reinterpret_cast<uintptr_t>(params.grad_x), reinterpret_cast<uintptr_t>(params.grad_out),
                        kItemsize, plan.channels_last ? 16 : kNchwBytes);
    const IndexBlocks blocks = index_blocks(plan.extent, plan.inner / vector.small);
    const int access = vector.small * kItemsize;

    BackwardLaunch launch{};
    launch.row = plan.large_row * kItemsize;
    launch.col = plan.large_col * kItemsize;
    for (int64_t k = 0; k < blocks.count() && error == cudaSuccess; ++k) {
      const Piece piece = make_piece(blocks, k, plan.small_stride, plan.large_stride, access,
                                     plan.channels_last ? access : 2 * access, kItemsize);
      launch.walk = piece.walk;
      launch.grad_x = static_cast<char*>(params.grad_x) + piece.a_offset;
      launch.grad_out = static_cast<const char*>(params.grad_out) + piece.b_offset;
      const uint32_t grid = blocks_of(piece.walk, kThreads, kBackwardUnroll);
      if (plan.channels_last) {
        dispatch_nhwc<16 / kItemsize>(vector.small, [&](auto small) {
          upsample_backward_nhwc<T, decltype(small)::value><<<grid, kThreads, 0, stream>>>(launch);
        });
      } else {
        dispatch_nchw<kItemsize>(vector, [&](auto small, auto large) {
          upsample_backward_nchw<T, decltype(small)::value, decltype(large)::value>
              <<<grid, kThreads, 0, stream>>>(launch);
        });
      }
      error = cudaGetLastError();
    }
  });
  return error;
}

}  // namespace torch_fastdet::core
