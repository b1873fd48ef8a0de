// Instance masks on the GPU. A block makes one tile of up to 32 masks: it fills those that the tile lies outside the
// box of with zeros, and takes the others eight at a time. Their logits at the few pixels of the prototypes that the
// tile is made of go to shared memory; each thread then mixes, compares and crops 16 neighbouring pixels of all eight,
// as bits.
#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/masks/masks_plan.h"

namespace torch_fastdet::core {

namespace {

constexpr int kThreads = 256;
constexpr int kGroup = kWarp;  // masks of a block
constexpr int kBatch = 8;      // masks at a time
constexpr int kChannels = 32;  // whose coefficients are in shared memory
constexpr int kSegment = 16;   // pixels of a thread
constexpr int kSegments = kTileWidth / kSegment;
constexpr int kPixels = kLowPixels / kThreads;  // of the prototypes, of a thread

struct Tile {
  int64_t image, first_mask;    // of the group
  int32_t x, y, width, height;  // of this tile, which the mask's edge may cut
  int low_width, low_height;
};

struct Shared {
  MaskTaps columns[kTileWidth], rows[kTileHeight];  // first: counted from the tile's first pixel of the prototypes
  int32_t source_column[kLowWidth], source_row[kLowHeight];
  float low[kBatch][kLowPixels];
  Vector<float, kBatch> coefficients[kChannels];
  uint16_t bits[kBatch][kTileHeight][kSegments];
  MaskBox boxes[kGroup];
  int order[kGroup];  // masks of the group: first those whose box the tile meets
  int met;
};

// a / b, in 32 bits where that is enough: a division in 64 bits takes some hundred instructions. Leaves the rest in
// `a`.
__device__ int64_t divide(int64_t& a, int64_t b) {
  const int64_t whole = a;
  const int64_t quotient = (whole | b) <= UINT32_MAX
                               ? static_cast<int64_t>(static_cast<uint32_t>(whole) / static_cast<uint32_t>(b))
                               : whole / b;
  a = whole - quotient * b;
  return quotient;
}

// Where the neighbours of pixel begin + i of the tile are along one axis.
__device__ void fill_taps(const MaskAxis& axis, int taps, bool dense, int32_t begin, int i, MaskTaps* entries,
                          int32_t* source) {
  MaskTaps entry = taps_of(axis, begin + i);
  if (dense) {
    entry.first -= taps_of(axis, begin).first;
  } else {
    const int32_t last = last_pixel(axis);
    for (int t = 0; t < taps; ++t) source[taps * i + t] = entry.first + t < last ? entry.first + t : last;
    entry.first = taps * i;
  }
  entries[i] = entry;
}

__device__ void fill_tables(const MasksParams& p, const MaskTile& plan, int taps, const Tile& tile, Shared& s) {
  static_assert(kTileWidth + kTileHeight <= kThreads, "a thread a column, and one a row");
  const int column = threadIdx.x, row = column - kTileWidth;
  if (column < tile.width) {
    fill_taps(p.columns, taps, plan.dense_columns, tile.x, column, s.columns, s.source_column);
  } else if (row >= 0 && row < tile.height) {
    fill_taps(p.rows, taps, plan.dense_rows, tile.y, row, s.rows, s.source_row);
  }
}

// Prototypes that are neighbours: the others' places are known since fill_tables.
__device__ void fill_dense(const MasksParams& p, const MaskTile& plan, const Tile& tile, Shared& s) {
  if (plan.dense_columns) {
    const int32_t first = taps_of(p.columns, tile.x).first, last = last_pixel(p.columns);
    for (int i = threadIdx.x; i < tile.low_width; i += kThreads)
      s.source_column[i] = first + i < last ? first + i : last;
  }
  if (plan.dense_rows) {
    const int32_t first = taps_of(p.rows, tile.y).first, last = last_pixel(p.rows);
    for (int i = threadIdx.x; i < tile.low_height; i += kThreads) s.source_row[i] = first + i < last ? first + i : last;
  }
}

// Sorts the group's masks into those whose box the tile meets and the others. The first warp calls.
__device__ void sort_group(const MasksParams& p, const Tile& tile, Shared& s) {
  const int lane = threadIdx.x;
  const bool exists = tile.first_mask + lane < p.count;
  MaskBox box{};
  bool meets = false;
  if (exists) {
    box = kept_by_box(p, tile.image, tile.first_mask + lane);
    PixelRange rows{tile.y, tile.y + tile.height}, columns{tile.x, tile.x + tile.width};
    if (p.crop_first) {
      rows = {s.source_row[0], s.source_row[tile.low_height - 1] + 1};
      columns = {s.source_column[0], s.source_column[tile.low_width - 1] + 1};
    }
    meets = !is_empty(box) && box.rows.low < rows.high && box.rows.high > rows.low && box.columns.low < columns.high &&
            box.columns.high > columns.low;
  }
  const unsigned met = __ballot_sync(kFullWarp, meets), before = (1u << lane) - 1;
  s.boxes[lane] = box;
  s.order[meets ? __popc(met & before) : __popc(met) + __popc(~met & before)] = lane;
  if (lane == 0) s.met = __popc(met);
}

// Four bits as four bytes.
__device__ uint32_t bytes_of_bits(uint32_t bits) {
  return ((bits & 15) * 0x00204081u) & 0x01010101u;
}

struct ByteStore {
  using Element = uint8_t;
  static constexpr int kCount = 16;
  static __device__ void all(uint8_t* out, uint32_t bits) {
    *reinterpret_cast<uint4*>(out) =
        make_uint4(bytes_of_bits(bits), bytes_of_bits(bits >> 4), bytes_of_bits(bits >> 8), bytes_of_bits(bits >> 12));
  }
};

struct FloatStore {
  using Element = float;
  static constexpr int kCount = 4;
  static __device__ void all(float* out, uint32_t bits) {
    const auto pixel = [bits](int i) { return bits >> i & 1 ? 1.f : 0.f; };
    *reinterpret_cast<float4*>(out) = make_float4(pixel(0), pixel(1), pixel(2), pixel(3));
  }
};

// The run of 16 bytes that a thread writes of each mask, where masks are aligned and a tile has no more runs than the
// block has threads; worked out once.
struct Run {
  bool exists = false;  // else store_pixels
  int row, from;        // of the tile
  int64_t place;        // in elements, of the group's first mask
};

template <typename Store>
__device__ Run run_of(const MasksParams& p, const Tile& tile, int tile_width) {
  constexpr int kCount = Store::kCount;
  Run run;
  const int runs = tile_width / kCount;
  run.row = threadIdx.x / runs, run.from = threadIdx.x % runs * kCount;
  run.place =
      ((tile.image * p.count + tile.first_mask) * p.rows.size + tile.y + run.row) * p.columns.size + tile.x + run.from;
  run.exists = p.columns.size % kCount == 0 && tile.height * runs <= kThreads;
  return run;
}

template <typename Store, typename Bits>
__device__ void store_run(const MasksParams& p, const Tile& tile, const Run& run, int in_group, Bits bits) {
  if (run.row >= tile.height || run.from >= tile.width) return;
  const uint32_t pixels = static_cast<uint32_t>(bits(run.row, run.from / kSegment)) >> run.from % kSegment;
  const int64_t mask_pixels = static_cast<int64_t>(p.rows.size) * p.columns.size;
  Store::all(static_cast<typename Store::Element*>(p.out) + run.place + in_group * mask_pixels, pixels);
}

// Writes one mask's tile in aligned runs of 16 bytes, whose first and last of a row may be cut. bits(row, segment)
// gives 16 pixels.
template <typename Store, typename Bits>
__device__ void store_pixels(const MasksParams& p, const Tile& tile, int tile_width, int64_t mask, Bits bits) {
  constexpr int kCount = Store::kCount;
  const bool aligned = p.columns.size % kCount == 0;
  const int runs = (tile_width / kCount) * (aligned ? 1 : 2);  // a power of two; half of them are idle if not aligned
  const int run = threadIdx.x & (runs - 1);
  typename Store::Element* out = static_cast<typename Store::Element*>(p.out);
  for (int row = threadIdx.x / runs; row < tile.height; row += kThreads / runs) {
    const int64_t begin = (mask * p.rows.size + tile.y + row) * p.columns.size + tile.x;
    const int from = run * kCount - static_cast<int>(begin & (kCount - 1));  // of the tile's pixels
    if (from >= tile.width || from + kCount <= 0) continue;
    const int segment = from >> 4, shift = from & 15;
    const auto at = [&](int i) { return i >= 0 && i < kSegments ? static_cast<uint32_t>(bits(row, i)) : 0u; };
    const uint32_t pixels = (shift ? at(segment) | at(segment + 1) << kSegment : at(segment)) >> shift;
    if (from >= 0 && from + kCount <= tile.width) {
      Store::all(out + begin + from, pixels);
      continue;
    }
    for (int i = 0; i < kCount; ++i) {
      if (from + i >= 0 && from + i < tile.width) out[begin + from + i] = pixels >> i & 1;
    }
  }
}

template <typename Bits>
__device__ void store_bits(const MasksParams& p, const Tile& tile, int tile_width, int64_t mask, Bits bits) {
  const int bytes = tile_width / 8, column = threadIdx.x & (bytes - 1);
  const int64_t row_bytes = (p.columns.size + 7) / 8;
  if (8 * column >= tile.width) return;
  for (int row = threadIdx.x / bytes; row < tile.height; row += kThreads / bytes) {
    const int64_t to = (mask * p.rows.size + tile.y + row) * row_bytes + tile.x / 8 + column;
    static_cast<uint8_t*>(p.out)[to] = static_cast<uint8_t>(bits(row, column / 2) >> 8 * (column & 1));
  }
}

__device__ Run run_of(const MasksParams& p, const Tile& tile, int tile_width) {
  return p.format == MaskFormat::kBytes ? run_of<ByteStore>(p, tile, tile_width) : Run();
}

template <typename Bits>
__device__ void store_tile(const MasksParams& p, const Tile& tile, int tile_width, const Run& run, int in_group,
                           Bits bits) {
  if (run.exists) return store_run<ByteStore>(p, tile, run, in_group, bits);
  const int64_t mask = tile.image * p.count + tile.first_mask + in_group;
  if (p.format == MaskFormat::kBytes) {
    store_pixels<ByteStore>(p, tile, tile_width, mask, bits);
  } else if (p.format == MaskFormat::kFloats) {
    store_pixels<FloatStore>(p, tile, tile_width, mask, bits);
  } else {
    store_bits(p, tile, tile_width, mask, bits);
  }
}

// Leaves the logits of eight masks at the tile's pixels of the prototypes in s.low. The coefficients are read in
// pieces.
template <typename T>
__device__ void low_logits(const MasksParams& p, const Tile& tile, Shared& s, int first, int live) {
  const int total = tile.low_width * tile.low_height, each = (total + kPixels - 1) / kPixels;
  const T* protos = static_cast<const T*>(p.protos) + tile.image * p.proto_stride[0];
  const T* from[kPixels];
  int pixel[kPixels];
#pragma unroll
  for (int k = 0; k < kPixels; ++k) {
    pixel[k] = static_cast<int>(threadIdx.x) < each ? static_cast<int>(threadIdx.x) + k * each : total;
    const int at = pixel[k] < total ? pixel[k] : 0;
    from[k] = protos + s.source_row[at / tile.low_width] * p.proto_stride[2] +
              s.source_column[at % tile.low_width] * p.proto_stride[3];
  }
  float sum[kPixels][kBatch] = {};
  for (int64_t piece = 0; piece < p.channels; piece += kChannels) {
    const int channels = p.channels - piece < kChannels ? static_cast<int>(p.channels - piece) : kChannels;
    __syncthreads();  // the last piece, and the last batch's logits, have been read
    for (int i = threadIdx.x; i < kChannels * kBatch; i += kThreads) {
      const int c = i % kChannels, m = i / kChannels;
      const bool exists = m < live && c < channels;
      s.coefficients[c].x[m] =
          exists ? p.coefficients[tile.image * p.coefficient_stride[0] +
                                  (tile.first_mask + s.order[first + m]) * p.coefficient_stride[1] + piece + c]
                 : 0.f;
    }
    __syncthreads();
    if (pixel[0] < total) {
#pragma unroll 8
      for (int c = 0; c < channels; ++c) {
        const Vector<float, kBatch> coefficients = s.coefficients[c];
#pragma unroll
        for (int k = 0; k < kPixels; ++k) {
          const float value = to_arithmetic(*from[k]);
          from[k] += p.proto_stride[1];
#pragma unroll
          for (int m = 0; m < kBatch; ++m) sum[k][m] = multiply_add(coefficients.x[m], value, sum[k][m]);
        }
      }
    }
  }
  if (p.channels == 0) __syncthreads();
#pragma unroll
  for (int k = 0; k < kPixels; ++k) {
    if (pixel[k] >= total) continue;
    const int32_t row = s.source_row[pixel[k] / tile.low_width], column = s.source_column[pixel[k] % tile.low_width];
#pragma unroll
    for (int m = 0; m < kBatch; ++m) {
      float value = p.sigmoid ? sigmoid(sum[k][m]) : sum[k][m];
      if (p.crop_first && m < live && !is_inside(s.boxes[s.order[first + m]], row, column)) value = 0.f;
      s.low[m][pixel[k]] = value;
    }
  }
}

// The rows of a column of a mask's logits, mixed.
template <int kTaps>
__device__ float mix_rows(const float* low, int low_width, const MaskTaps& row, int column) {
  float values[kTaps];
#pragma unroll
  for (int t = 0; t < kTaps; ++t) values[t] = low[(row.first + t) * low_width + column];
  return mix<kTaps>(values, row);
}

// Takes one more pixel, kept where `distance` is below zero: its sign is shifted in. The GPU's NaN has none.
__device__ uint32_t with_pixel(uint32_t bits, float distance) {
#ifdef __CUDA_ARCH__
  return __funnelshift_l(__float_as_uint(distance), bits, 1);
#else
  return bits << 1 | (distance < 0.f ? 1u : 0u);
#endif
}

// The first kSegment pixels that were taken, the first of them in the lowest bit.
__device__ uint32_t in_order(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __brev(bits) >> (32 - kSegment);
#else
  uint32_t reversed = 0;
  for (int i = 0; i < kSegment; ++i) reversed |= (bits >> i & 1) << (kSegment - 1 - i);
  return reversed;
#endif
}

// 16 pixels of a row of kMasks masks, as bits in s.bits.
template <int kTaps, int kMasks>
__device__ void threshold_segment(const MasksParams& p, const Tile& tile, Shared& s, int row, int segment,
                                  int first_mask, int first) {
  const MaskTaps row_taps = s.rows[row];
  const float threshold = threshold_of(p);
  const int begin = segment * kSegment, last = tile.width - 1;
  float mixed[kMasks][kTaps], above[kMasks][kTaps];
  uint32_t bits[kMasks] = {};
  int at = -2;  // the column that mixed[...][0] is of
  for (int i = 0; i < kSegment; ++i) {
    const MaskTaps taps = s.columns[begin + i < last ? begin + i : last];
    if (taps.first != at) {
      const bool next = taps.first == at + 1;  // keep what both need
      at = taps.first;
#pragma unroll
      for (int m = 0; m < kMasks; ++m) {
        const float* low = s.low[first_mask + m];
#pragma unroll
        for (int t = 0; t < kTaps; ++t) {
          if (next && t + 1 < kTaps) {
            mixed[m][t] = mixed[m][t + 1 < kTaps ? t + 1 : t];
          } else {
            mixed[m][t] = mix_rows<kTaps>(low, tile.low_width, row_taps, at + t);
          }
          above[m][t] = mixed[m][t];
        }
        distances<kTaps>(above[m], threshold);
      }
    }
#pragma unroll
    for (int m = 0; m < kMasks; ++m) {
      bits[m] = with_pixel(bits[m], distance<kTaps>(above[m], taps.weight[1], taps.weight[2]));
    }
  }
#pragma unroll
  for (int m = 0; m < kMasks; ++m) {
    uint32_t kept = 0xffffu >> (begin + kSegment > tile.width ? begin + kSegment - tile.width : 0);
    if (!p.crop_first) {
      const MaskBox& box = s.boxes[s.order[first + first_mask + m]];
      const int x = tile.x + begin, y = tile.y + row;
      const int low = box.columns.low - x, high = box.columns.high - x;
      if (y < box.rows.low || y >= box.rows.high) kept = 0;
      kept &= high <= 0 ? 0u : (high < kSegment ? (1u << high) - 1 : 0xffffu);
      kept &= low <= 0 ? 0xffffu : (low < kSegment ? 0xffffu << low : 0u);
    }
    s.bits[first_mask + m][row][segment] = static_cast<uint16_t>(in_order(bits[m]) & kept);
  }
}

// kMasks: how many of a batch's masks a thread takes. All, where a tile has enough segments for all threads.
template <typename T, int kTaps, int kMasks>
__global__ void __launch_bounds__(kThreads, 3)
    masks_kernel(const __grid_constant__ MasksParams p, const __grid_constant__ MaskTile plan, int64_t first_block) {
  __shared__ Shared s;
  Tile tile;
  int64_t rest = first_block + blockIdx.x;
  // Tiles of one group are neighbours, so that they find its coefficients in the cache.
  tile.image = divide(rest, (p.count + kGroup - 1) / kGroup * plan.rows * plan.columns);
  tile.first_mask = kGroup * divide(rest, plan.rows * plan.columns);
  tile.y = static_cast<int32_t>(divide(rest, plan.columns) * plan.height);
  tile.x = static_cast<int32_t>(rest * plan.width);
  tile.width = p.columns.size - tile.x < plan.width ? p.columns.size - tile.x : plan.width;
  tile.height = p.rows.size - tile.y < plan.height ? p.rows.size - tile.y : plan.height;
  fill_tables(p, plan, kTaps, tile, s);
  __syncthreads();
  tile.low_width = s.columns[tile.width - 1].first + kTaps;
  tile.low_height = s.rows[tile.height - 1].first + kTaps;
  fill_dense(p, plan, tile, s);
  __syncthreads();
  if (threadIdx.x < kWarp) sort_group(p, tile, s);
  __syncthreads();
  const int met = s.met;
  const int64_t left = p.count - tile.first_mask;
  const Run run = run_of(p, tile, plan.width);
  for (int i = met; i < kGroup; ++i) {
    if (s.order[i] < left) store_tile(p, tile, plan.width, run, s.order[i], [](int, int) { return uint16_t{0}; });
  }
  const int segments = plan.width / kSegment;
  for (int first = 0; first < met; first += kBatch) {
    const int live = met - first < kBatch ? met - first : kBatch;
    low_logits<T>(p, tile, s, first, live);
    __syncthreads();
    for (int item = threadIdx.x; item < segments * plan.height * (kBatch / kMasks); item += kThreads) {
      const int segment = item % segments, at_row = item / segments % plan.height;
      const int mask = item / segments / plan.height * kMasks;
      if (at_row < tile.height && segment * kSegment < tile.width && mask < live) {
        threshold_segment<kTaps, kMasks>(p, tile, s, at_row, segment, mask, first);
      }
    }
    __syncthreads();
    for (int m = 0; m < live; ++m) {
      store_tile(p, tile, plan.width, run, s.order[first + m],
                 [&](int y, int segment) { return s.bits[m][y][segment]; });
    }
  }
}

template <typename T, int kTaps, int kMasks>
cudaError_t launch(const MasksParams& p, const MaskTile& tile, cudaStream_t stream) {
  constexpr int64_t kMost = 2147483647;
  const int64_t blocks = tile.columns * tile.rows * ceil_div(p.count, kGroup) * p.images;
  for (int64_t first = 0; first < blocks; first += kMost) {
    const unsigned count = static_cast<unsigned>(blocks - first < kMost ? blocks - first : kMost);
    masks_kernel<T, kTaps, kMasks><<<count, kThreads, 0, stream>>>(p, tile, first);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_taps(const MasksParams& p, const MaskTile& tile, cudaStream_t stream) {
  const bool large = tile.width * tile.height >= kThreads * kSegment;
  if (tile.taps == 1) return launch<T, 1, 1>(p, tile, stream);
  if (tile.taps == 2) return large ? launch<T, 2, kBatch>(p, tile, stream) : launch<T, 2, 1>(p, tile, stream);
  return large ? launch<T, 3, kBatch>(p, tile, stream) : launch<T, 3, 1>(p, tile, stream);
}

}  // namespace

cudaError_t launch_masks(const MasksParams& params, cudaStream_t stream) {
  if (params.images == 0 || params.count == 0) return cudaSuccess;
  const MaskTile tile = plan_mask_tiles(params);
  switch (params.proto_type) {
    case DType::kFloat16:
      return launch_taps<__half>(params, tile, stream);
    case DType::kBFloat16:
      return launch_taps<__nv_bfloat16>(params, tile, stream);
    default:  // the glue makes float32 of the others
      return launch_taps<float>(params, tile, stream);
  }
}

}  // namespace torch_fastdet::core
