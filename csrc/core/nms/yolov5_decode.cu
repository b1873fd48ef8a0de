// Decode YOLOv5 heads. A block takes neighbouring cells of one anchor of one map and reads them along cells or
// channels, whichever are adjacent. It writes their rows, which are adjacent in the output, through shared memory.
#include "core/nms/decode.h"
#include "core/nms/nms_device.cuh"

namespace torch_fastdet::core {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxCells = 64;
constexpr int kSharedBytes = 40960;

struct Kernel {
  DecodeParams decode;
  int32_t cells;                        // cells per block
  bool staged;                          // rows fit in shared memory
  int32_t blocks_of_level[kMaxLevels];  // blocks for one anchor of one image
  int64_t blocks_per_image;
};

// Decode one channel according to its kind. Center and side need more than the logit.
template <typename T>
__device__ __forceinline__ T decoded(const CandidateSource& source, const HeadLevel& head, T raw, int anchor_side,
                                     int row, int column, int channel) {
  using A = arithmetic_t<T>;
  if (channel >= 5 + source.classes) return raw;
  const A share = sigmoid(Storage<T>::load(raw));
  if (channel >= 4) return Storage<T>::store(share);
  const A stride = A(head.stride);
  if (channel < 2) return Storage<T>::store(center_of(share, channel ? row : column, stride));
  const float* sides = source.anchor_sides_device ? source.anchor_sides_device : source.anchor_sides;
  return Storage<T>::store(side_of(share, mul_rn(A(sides[anchor_side + channel - 2]), stride)));
}

// Describe the work of one block: `cells` cells of one anchor of one map, beginning with cell `first`.
template <typename T>
struct Piece {
  int level, anchor, first, cells, channels, side;
  const T* data;
  T* out;
};

template <typename T>
__device__ __forceinline__ Piece<T> find_piece(const Kernel& k) {
  const CandidateSource& source = k.decode.source;
  const int64_t image = blockIdx.x / k.blocks_per_image;
  int block = static_cast<int>(blockIdx.x - image * k.blocks_per_image);
  int level = 0;
  while (block >= k.blocks_of_level[level] * source.anchors_per_cell) {
    block -= k.blocks_of_level[level] * source.anchors_per_cell;
    ++level;
  }
  const HeadLevel& head = source.level[level];
  const int anchor = block / k.blocks_of_level[level];
  const int first = (block - anchor * k.blocks_of_level[level]) * k.cells;
  const int size = head.rows * head.columns;
  const int cells = size - first < k.cells ? size - first : k.cells;
  const int channels = static_cast<int>(5 + source.classes + source.extra);
  const int64_t first_row = image * source.anchors + head.first_anchor + static_cast<int64_t>(anchor) * size + first;
  return {level,
          anchor,
          first,
          cells,
          channels,
          (level * source.anchors_per_cell + anchor) * 2,
          static_cast<const T*>(head.boxes.data) + image * head.boxes.image + anchor * head.boxes.anchor,
          static_cast<T*>(k.decode.output) + first_row * channels};
}

// If cells are adjacent, each thread goes through the channels of one cell, and a warp reads neighbouring cells.
template <typename T>
__device__ __forceinline__ void decode_by_cell(const Kernel& k, const HeadLevel& head, const Piece<T>& piece,
                                               T* target) {
  constexpr int kBatch = 8;
  const int cell = threadIdx.x % k.cells, step = kThreads / k.cells;
  if (cell >= piece.cells || threadIdx.x >= step * k.cells) return;
  const int row = (piece.first + cell) / head.columns, column = piece.first + cell - row * head.columns;
  const T* cell_data = piece.data + row * head.boxes.row + column * head.boxes.column;
  T* cell_target = target + cell * piece.channels;
  const int64_t channel_stride = head.boxes.channel;
  for (int start = threadIdx.x / k.cells; start < piece.channels; start += kBatch * step) {
    T raw[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int channel = start + b * step;
      raw[b] = channel < piece.channels ? cell_data[channel * channel_stride] : T{};
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int channel = start + b * step;
      if (channel < piece.channels) {
        cell_target[channel] = decoded(k.decode.source, head, raw[b], piece.side, row, column, channel);
      }
    }
  }
}

// If channels are adjacent, a warp reads the channels of one or several cells, 32 elements at a time.
template <typename T>
__device__ __forceinline__ void decode_by_channel(const Kernel& k, const HeadLevel& head, const Piece<T>& piece,
                                                  T* target) {
  const int channels = piece.channels, total = piece.cells * channels;
  const int step_cells = kThreads / channels, step_channels = kThreads - step_cells * channels;
  int cell = static_cast<int>(threadIdx.x) / channels, channel = static_cast<int>(threadIdx.x) - cell * channels;
  int row = (piece.first + cell) / head.columns, column = piece.first + cell - row * head.columns;
  const auto advance = [&] {
    channel += step_channels;
    int moved_cells = step_cells;
    if (channel >= channels) {
      channel -= channels;
      ++moved_cells;
    }
    cell += moved_cells;
    column += moved_cells;
    while (column >= head.columns) {
      column -= head.columns;
      ++row;
    }
  };
  for (int start = threadIdx.x; start < total; start += 4 * kThreads) {
    T raw[4];
    int at_row[4], at_column[4], at_channel[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      at_row[b] = row;
      at_column[b] = column;
      at_channel[b] = channel;
      raw[b] = start + b * kThreads < total
                   ? piece.data[row * head.boxes.row + column * head.boxes.column + channel * head.boxes.channel]
                   : T{};
      advance();
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int i = start + b * kThreads;
      if (i < total) {
        target[i] = decoded(k.decode.source, head, raw[b], piece.side, at_row[b], at_column[b], at_channel[b]);
      }
    }
  }
}

// Write the rows that were decoded into shared memory, 16 bytes at a time where aligned.
template <typename T>
__device__ __forceinline__ void write_rows(const T* target, T* out, int total) {
  constexpr int kVector = Vector<T>::kSize;
  if (is_vector_aligned(out)) {
    const int vectors = total / kVector;
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
      reinterpret_cast<int4*>(out)[i] = reinterpret_cast<const int4*>(target)[i];
    }
    for (int i = vectors * kVector + threadIdx.x; i < total; i += kThreads) out[i] = target[i];
  } else {
    for (int i = threadIdx.x; i < total; i += kThreads) out[i] = target[i];
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ Kernel k) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Piece<T> piece = find_piece<T>(k);
  const HeadLevel& head = k.decode.source.level[piece.level];
  T* target = k.staged ? reinterpret_cast<T*>(shared) : piece.out;
  if (head.boxes.column < head.boxes.channel) {
    decode_by_cell(k, head, piece, target);
  } else {
    decode_by_channel(k, head, piece, target);
  }
  if (!k.staged) return;
  __syncthreads();
  write_rows(target, piece.out, piece.cells * piece.channels);
}

}  // namespace

cudaError_t launch_yolov5_decode(const DecodeParams& params, cudaStream_t stream) {
  const CandidateSource& source = params.source;
  if (source.images * source.anchors == 0) return cudaSuccess;
  return dispatch(source.dtype, [&](auto zero) {
    using T = decltype(zero);
    Kernel k{};
    k.decode = params;
    const int64_t row_bytes = (5 + source.classes + source.extra) * static_cast<int64_t>(sizeof(T));
    const int64_t fitting = kSharedBytes / row_bytes;
    k.staged = fitting >= 8;
    k.cells = !k.staged || fitting >= kMaxCells ? kMaxCells : static_cast<int32_t>(fitting / 8 * 8);
    for (int level = 0; level < source.levels; ++level) {
      const int64_t cells = static_cast<int64_t>(source.level[level].rows) * source.level[level].columns;
      k.blocks_of_level[level] = static_cast<int32_t>(ceil_div(cells, k.cells));
      k.blocks_per_image += static_cast<int64_t>(k.blocks_of_level[level]) * source.anchors_per_cell;
    }
    const size_t bytes = k.staged ? static_cast<size_t>(k.cells * row_bytes) : 0;
    decode_kernel<T><<<static_cast<unsigned>(k.blocks_per_image * source.images), kThreads, bytes, stream>>>(k);
    return cudaGetLastError();
  });
}

}  // namespace torch_fastdet::core
