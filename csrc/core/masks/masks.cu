// Compute instance masks on the GPU. The blocks of one tile share up to 256 masks, eight per block. The first blocks
// take the masks whose box intersects the tile. They compute the masks' logits at the few prototype pixels that the
// tile needs, in shared memory. Then each thread mixes, thresholds and crops 16 neighbouring pixels of all eight masks,
// as bits, and writes them. The other blocks meanwhile fill masks with zeros.
#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/masks/masks_plan.h"

namespace torch_fastdet::core {

namespace {

constexpr int kThreads = kMaskGroup;  // each thread checks one box of the group
constexpr int kBatch = kMaskBatch;
constexpr int kChannels = 32;  // channels whose coefficients are in shared memory
constexpr int kSegment = 16;   // pixels per thread
constexpr int kSegments = kTileWidth / kSegment;
constexpr int kPixels = kLowPixels / kThreads;  // prototype pixels per thread
constexpr int kQuad = 4;                        // floats of one access

struct Tile {
  int64_t image, first_mask;    // the group's image and first mask
  int32_t x, y, width, height;  // tile, cropped to the mask
};

// Return the offset of the logits of pixel i. Every fourth pixel skips four banks, for threads four pixels apart.
__device__ unsigned low_at(unsigned i) {
  return i * kBatch + i / kQuad * kQuad;
}

struct Shared {
  // The tile's columns, segment by segment, have their first pixel relative to the tile's first prototype pixel.
  int32_t column_first[kTileWidth];
  float column_weight[kMostTaps - 1][kTileWidth];  // weights of the neighbours after the first
  MaskTaps rows[kTileHeight];
  int32_t source_column[kLowWidth], source_row[kLowHeight];
  alignas(16) float low[kLowPixels * kBatch + kLowPixels / 4 * kQuad];
  Vector<float, kBatch> coefficients[kChannels];
  uint16_t bits[kBatch][kTileHeight][kSegments];
  MaskBox boxes[kBatch], kept[kBatch];  // kept: pixels of the tile to keep after the resampling
  int order[kBatch];                    // indices of this block's masks within the group
  int met[kThreads / kWarp];
};

// Return a / b, and leave the rest in `a`. A 64-bit division takes some hundred instructions: use 32 bits if possible.
__device__ int64_t divide(int64_t& a, int64_t b) {
  const int64_t whole = a;
  const int64_t quotient = (whole | b) <= UINT32_MAX
                               ? static_cast<int64_t>(static_cast<uint32_t>(whole) / static_cast<uint32_t>(b))
                               : whole / b;
  a = whole - quotient * b;
  return quotient;
}

// Return the range that a box must intersect along one axis: the tile's pixels, or prototype pixels if cropping first.
__device__ PixelRange range_of(const MaskAxis& axis, bool crop_first, int taps, int32_t begin, int32_t size) {
  if (!crop_first) return {begin, begin + size};
  const int32_t last = last_pixel(axis), end = taps_of(axis, begin + size - 1).first + taps - 1;
  return {taps_of(axis, begin).first, (end < last ? end : last) + 1};
}

// Return the part of a box within a tile, relative to the tile's first pixel, or the whole tile if cropping first.
__device__ MaskBox kept_of_tile(const MasksParams& p, const Tile& tile, const MaskBox& box) {
  if (p.crop_first) return {{0, tile.height}, {0, tile.width}};
  const auto within = [](int32_t pixel, int32_t begin, int32_t size) {
    return pixel <= begin ? 0 : (pixel - begin < size ? pixel - begin : size);
  };
  return {{within(box.rows.low, tile.y, tile.height), within(box.rows.high, tile.y, tile.height)},
          {within(box.columns.low, tile.x, tile.width), within(box.columns.high, tile.x, tile.width)}};
}

struct Share {
  int count;
  bool met;  // whether the tile intersects their boxes
};

// Divide the group's masks among the tile's blocks, kBatch for each. The first blocks take the masks whose box
// intersects the tile, the next ones the others. Every thread must call this.
__device__ Share share_of(const MasksParams& p, const Tile& tile, int taps, int group, int job, Shared& s) {
  const int index = threadIdx.x, lane = index % kWarp, warp = index / kWarp;
  MaskBox box{};
  bool meets = false;
  if (index < group) {
    box = kept_by_box(p, tile.image, tile.first_mask + index);
    const PixelRange rows = range_of(p.rows, p.crop_first, taps, tile.y, tile.height);
    const PixelRange columns = range_of(p.columns, p.crop_first, taps, tile.x, tile.width);
    meets = !is_empty(box) && box.rows.low < rows.high && box.rows.high > rows.low && box.columns.low < columns.high &&
            box.columns.high > columns.low;
  }
  const unsigned found = __ballot_sync(kFullWarp, meets);
  if (lane == 0) s.met[warp] = __popc(found);
  __syncthreads();
  int before = __popc(found & ((1u << lane) - 1)), met = 0;  // before: intersecting masks before this one
#pragma unroll
  for (int i = 0; i < kThreads / kWarp; ++i) {
    if (i < warp) before += s.met[i];
    met += s.met[i];
  }
  const int busy = (met + kBatch - 1) / kBatch;  // blocks with intersecting masks
  Share share;
  share.met = job < busy;
  const int first = (share.met ? job : job - busy) * kBatch, left = (share.met ? met : group - met) - first;
  share.count = left < kBatch ? left : kBatch;
  const int rank = (meets ? before : index - before) - first;
  if (index < group && meets == share.met && rank >= 0 && rank < kBatch) {
    s.order[rank] = index, s.boxes[rank] = box, s.kept[rank] = kept_of_tile(p, tile, box);
  }
  __syncthreads();
  return share;
}

// Return the neighbours of the tile's pixel i, or of its last one, along one axis, relative to the tile's first.
__device__ MaskTaps taps_in_tile(const MaskAxis& axis, int taps, bool dense, int32_t begin, int32_t size, int i,
                                 int32_t* source) {
  MaskTaps entry = taps_of(axis, begin + (i < size ? i : size - 1));
  if (dense) {
    entry.first -= taps_of(axis, begin).first;
  } else {
    const int32_t last = last_pixel(axis);
    for (int t = 0; t < taps && i < size; ++t) source[taps * i + t] = entry.first + t < last ? entry.first + t : last;
    entry.first = taps * (i < size ? i : size - 1);
  }
  return entry;
}

// List adjacent prototype pixels, of which there may be fewer than `count`.
__device__ void fill_dense(const MaskAxis& axis, int32_t begin, int32_t* source, int count) {
  const int32_t i = threadIdx.x, pixel = taps_of(axis, begin).first + i, last = last_pixel(axis);
  if (i < count) source[i] = pixel < last ? pixel : last;
}

__device__ int column_at(int column) {
  return column % kSegment * kSegments + column / kSegment;
}

__device__ void fill_tables(const MasksParams& p, const MaskTile& plan, int taps, const Tile& tile, Shared& s) {
  static_assert(kTileWidth + kTileHeight <= kThreads && kLowWidth <= kThreads && kLowHeight <= kThreads,
                "a thread each");
  const int column = threadIdx.x, row = column - kTileWidth;
  if (column < plan.width) {
    const MaskTaps entry =
        taps_in_tile(p.columns, taps, plan.dense_columns, tile.x, tile.width, column, s.source_column);
    s.column_first[column_at(column)] = entry.first;
#pragma unroll
    for (int t = 1; t < kMostTaps; ++t) s.column_weight[t - 1][column_at(column)] = entry.weight[t];
  } else if (row >= 0 && row < tile.height) {
    s.rows[row] = taps_in_tile(p.rows, taps, plan.dense_rows, tile.y, tile.height, row, s.source_row);
  }
  if (plan.dense_columns) fill_dense(p.columns, tile.x, s.source_column, kLowWidth);
  if (plan.dense_rows) fill_dense(p.rows, tile.y, s.source_row, kLowHeight);
}

__device__ uint32_t bytes_of_bits(uint32_t bits) {
  return ((bits & 15) * 0x00204081u) & 0x01010101u;
}

struct ByteStore {
  using Element = uint8_t;
  static constexpr int kCount = 16;
  static __device__ void all(uint8_t* out, uint32_t bits) {
    // These bytes are not read again soon, so they should not evict the prototypes from the cache.
    __stcs(reinterpret_cast<uint4*>(out), make_uint4(bytes_of_bits(bits), bytes_of_bits(bits >> 4),
                                                     bytes_of_bits(bits >> 8), bytes_of_bits(bits >> 12)));
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

// Return whether each thread writes its own segments without s.bits, because segments are aligned.
__device__ bool is_direct(const MasksParams& p) {
  return p.format != MaskFormat::kFloats && p.columns.size % kSegment == 0;
}

__device__ void store_segment(const MasksParams& p, int64_t place, uint32_t bits) {
  if (p.format == MaskFormat::kBytes) {
    ByteStore::all(static_cast<uint8_t*>(p.out) + place, bits);
  } else {
    *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.out) + place / 8) = static_cast<uint16_t>(bits);
  }
}

__device__ int64_t place_of(const MasksParams& p, const Tile& tile, int row, int segment) {
  const int64_t mask = tile.image * p.count + tile.first_mask;
  return (mask * p.rows.size + tile.y + row) * p.columns.size + tile.x + segment * kSegment;
}

// Write one mask's tile in aligned runs of 16 bytes, clipped at a row's ends. bits(row, segment) returns 16 pixels.
template <typename Store, typename Bits>
__device__ void store_pixels(const MasksParams& p, const Tile& tile, int tile_width, int64_t mask, Bits bits) {
  constexpr int kCount = Store::kCount;
  const bool aligned = p.columns.size % kCount == 0;
  const int runs = (tile_width / kCount) * (aligned ? 1 : 2);  // a power of two; half are idle if not aligned
  const int run = threadIdx.x & (runs - 1);
  typename Store::Element* out = static_cast<typename Store::Element*>(p.out);
  for (int row = threadIdx.x / runs; row < tile.height; row += kThreads / runs) {
    const int64_t begin = (mask * p.rows.size + tile.y + row) * p.columns.size + tile.x;
    const int from = run * kCount - static_cast<int>(begin & (kCount - 1));  // first pixel within the tile
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

template <typename Bits>
__device__ void store_tile(const MasksParams& p, const Tile& tile, int tile_width, int in_group, Bits bits) {
  const int64_t mask = tile.image * p.count + tile.first_mask + in_group;
  if (p.format == MaskFormat::kBytes) {
    store_pixels<ByteStore>(p, tile, tile_width, mask, bits);
  } else if (p.format == MaskFormat::kFloats) {
    store_pixels<FloatStore>(p, tile, tile_width, mask, bits);
  } else {
    store_bits(p, tile, tile_width, mask, bits);
  }
}

__device__ void clear(const MasksParams& p, const MaskTile& plan, const Tile& tile, const Shared& s, int count) {
  if (!is_direct(p)) {
    for (int m = 0; m < count; ++m) store_tile(p, tile, plan.width, s.order[m], [](int, int) { return uint16_t{0}; });
    return;
  }
  const int segments = plan.width / kSegment, segment = threadIdx.x % segments;
  const int64_t mask_pixels = static_cast<int64_t>(p.rows.size) * p.columns.size;
  if (segment * kSegment >= tile.width) return;
  for (int row = threadIdx.x / segments; row < tile.height; row += kThreads / segments) {
    const int64_t place = place_of(p, tile, row, segment);
#pragma unroll
    for (int m = 0; m < kBatch; ++m) {
      if (m < count) store_segment(p, place + s.order[m] * mask_pixels, 0);
    }
  }
}

// Load the coefficients of the block's masks, beginning with channel `piece`.
__device__ void load_coefficients(const MasksParams& p, const Tile& tile, Shared& s, int64_t piece, int live) {
  static_assert(kChannels * kBatch == kThreads, "one a thread");
  const int c = threadIdx.x % kChannels, m = threadIdx.x / kChannels;
  float coefficient = 0.f;
  if (m < live && piece + c < p.channels) {
    const int64_t mask = tile.first_mask + s.order[m];
    coefficient = p.coefficients[tile.image * p.coefficient_stride[0] + mask * p.coefficient_stride[1] + piece + c];
  }
  s.coefficients[c].x[m] = coefficient;
}

// Store the logits of the block's masks at the tile's prototype pixels in s.low. The caller has loaded the first
// coefficients; this function loads the others in pieces.
template <typename T>
__device__ void low_logits(const MasksParams& p, const Tile& tile, Shared& s, int low_width, int low_height, int live) {
  const int total = low_width * low_height, each = (total + kPixels - 1) / kPixels;
  const T* protos = static_cast<const T*>(p.protos) + tile.image * p.proto_stride[0];
  const T* from[kPixels];
  int pixel[kPixels];
#pragma unroll
  for (int k = 0; k < kPixels; ++k) {
    pixel[k] = static_cast<int>(threadIdx.x) < each ? static_cast<int>(threadIdx.x) + k * each : total;
    const int at = pixel[k] < total ? pixel[k] : 0;
    from[k] =
        protos + s.source_row[at / low_width] * p.proto_stride[2] + s.source_column[at % low_width] * p.proto_stride[3];
  }
  alignas(16) float sum[kPixels][kBatch] = {};
  for (int64_t piece = 0; piece < p.channels; piece += kChannels) {
    if (piece > 0) {
      __syncthreads();  // the previous piece has been used
      load_coefficients(p, tile, s, piece, live);
      __syncthreads();
    }
    const int channels = p.channels - piece < kChannels ? static_cast<int>(p.channels - piece) : kChannels;
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
#pragma unroll
  for (int k = 0; k < kPixels; ++k) {
    if (pixel[k] >= total) continue;
    float* logits = s.low + low_at(pixel[k]);
    *reinterpret_cast<Vector<float, kBatch>*>(logits) = *reinterpret_cast<const Vector<float, kBatch>*>(sum[k]);
    if (!p.sigmoid && !p.crop_first) continue;
    const int32_t row = s.source_row[pixel[k] / low_width], column = s.source_column[pixel[k] % low_width];
#pragma unroll 1
    for (int m = 0; m < live; ++m) {
      const bool kept = !p.crop_first || is_inside(s.boxes[m], row, column);
      logits[m] = !kept ? 0.f : (p.sigmoid ? sigmoid(logits[m]) : logits[m]);
    }
  }
}

// Return the logits of kMasks masks, beginning with the block's mask `first`, at one prototype pixel.
template <int kMasks>
__device__ Vector<float, kMasks> low_of(const Shared& s, int pixel, int first) {
  return *reinterpret_cast<const Vector<float, kMasks>*>(s.low + low_at(pixel) + first);
}

// Mix the rows of one column of kMasks masks' logits.
template <int kTaps, int kMasks>
__device__ void mix_rows(const Shared& s, int low_width, const MaskTaps& row, int column, int first,
                         float (&mixed)[kMasks]) {
  Vector<float, kMasks> values[kTaps];
#pragma unroll
  for (int t = 0; t < kTaps; ++t) values[t] = low_of<kMasks>(s, (row.first + t) * low_width + column, first);
#pragma unroll
  for (int m = 0; m < kMasks; ++m) {
    float of_mask[kTaps];
#pragma unroll
    for (int t = 0; t < kTaps; ++t) of_mask[t] = values[t].x[m];
    mixed[m] = mix<kTaps>(of_mask, row);
  }
}

// Shift in one more pixel, which is kept if `distance` is negative: its sign bit. The GPU's NaN has no sign.
__device__ uint32_t with_pixel(uint32_t bits, float distance) {
#ifdef __CUDA_ARCH__
  return __funnelshift_l(__float_as_uint(distance), bits, 1);
#else
  return bits << 1 | (distance < 0.f ? 1u : 0u);
#endif
}

// Return 16 pixels of a row of kMasks masks, beginning with the block's mask `first`, as bits.
template <int kTaps, int kMasks>
__device__ void threshold_segment(const MasksParams& p, const Shared& s, int low_width, int row, int segment, int first,
                                  uint32_t (&bits)[kMasks]) {
  const MaskTaps row_taps = s.rows[row];
  const float threshold = threshold_of(p);
  float mixed[kTaps][kMasks], above[kMasks][kTaps];
  int column = -2;  // column of mixed[0]
#pragma unroll
  for (int m = 0; m < kMasks; ++m) bits[m] = 0;
    // Begin with the last pixel, which thus ends in the highest bit.
#pragma unroll 1
  for (int i = segment + kTileWidth - kSegments; i >= 0; i -= kSegments) {
    const int32_t begin = s.column_first[i];
    if (begin != column) {
      const bool next = begin == column - 1;  // reuse what both columns need
      column = begin;
#pragma unroll
      for (int t = kTaps - 1; t >= 0; --t) {
        if (next && t > 0) {
#pragma unroll
          for (int m = 0; m < kMasks; ++m) mixed[t][m] = mixed[t > 0 ? t - 1 : t][m];
        } else {
          mix_rows<kTaps, kMasks>(s, low_width, row_taps, column + t, first, mixed[t]);
        }
      }
#pragma unroll
      for (int m = 0; m < kMasks; ++m) {
#pragma unroll
        for (int t = 0; t < kTaps; ++t) above[m][t] = mixed[t][m];
        distances<kTaps>(above[m], threshold);
      }
    }
    const float second = s.column_weight[0][i], third = kTaps > 2 ? s.column_weight[kMostTaps - 2][i] : 0.f;
#pragma unroll
    for (int m = 0; m < kMasks; ++m) bits[m] = with_pixel(bits[m], distance<kTaps>(above[m], second, third));
  }
#pragma unroll
  for (int m = 0; m < kMasks; ++m) {
    const MaskBox& kept = s.kept[first + m];
    const auto within = [segment](int32_t pixel) {
      const int32_t in_segment = pixel - segment * kSegment;
      return in_segment < 0 ? 0 : (in_segment < kSegment ? in_segment : kSegment);
    };
    const bool inside = row >= kept.rows.low && row < kept.rows.high;
    const uint32_t pixels = (1u << within(kept.columns.high)) - (1u << within(kept.columns.low));
    bits[m] = inside ? bits[m] & pixels : 0u;
  }
}

// Compute the block's masks from their logits, kMasks per thread: all masks if a tile has segments for all threads.
template <int kTaps, int kMasks>
__device__ void make(const MasksParams& p, const MaskTile& plan, const Tile& tile, Shared& s, int low_width, int live) {
  const int segments = plan.width / kSegment;
  const int64_t mask_pixels = static_cast<int64_t>(p.rows.size) * p.columns.size;
  const bool direct = is_direct(p);
  for (int item = threadIdx.x; item < segments * plan.height * (kBatch / kMasks); item += kThreads) {
    const int segment = item % segments, row = item / segments % plan.height;
    const int first = item / segments / plan.height * kMasks;
    if (row >= tile.height || segment * kSegment >= tile.width || first >= live) continue;
    uint32_t bits[kMasks];
    threshold_segment<kTaps, kMasks>(p, s, low_width, row, segment, first, bits);
    const int64_t place = place_of(p, tile, row, segment);
#pragma unroll
    for (int m = 0; m < kMasks; ++m) {
      if (!direct) {
        s.bits[first + m][row][segment] = static_cast<uint16_t>(bits[m]);
      } else if (first + m < live) {
        store_segment(p, place + s.order[first + m] * mask_pixels, bits[m]);
      }
    }
  }
  if (direct) return;
  __syncthreads();
  for (int m = 0; m < live; ++m) {
    store_tile(p, tile, plan.width, s.order[m], [&](int y, int segment) { return s.bits[m][y][segment]; });
  }
}

template <typename T, int kTaps, int kMasks>
__global__ void __launch_bounds__(kThreads, kTaps* kMasks > 2 * kBatch ? 3 : 4)
    masks_kernel(const __grid_constant__ MasksParams p, const __grid_constant__ MaskTile plan, int64_t first_block) {
  __shared__ Shared s;
  Tile tile;
  int64_t job = first_block + blockIdx.x;
  // Blocks of one tile are neighbours: they share the cache, and blocks that compute run beside blocks that only write.
  tile.image = divide(job, plan.groups * plan.rows * plan.columns * plan.jobs);
  tile.first_mask = plan.group * divide(job, plan.rows * plan.columns * plan.jobs);
  int64_t place = divide(job, plan.jobs);
  tile.y = static_cast<int32_t>(divide(place, plan.columns) * plan.height);
  tile.x = static_cast<int32_t>(place * plan.width);
  tile.width = p.columns.size - tile.x < plan.width ? p.columns.size - tile.x : plan.width;
  tile.height = p.rows.size - tile.y < plan.height ? p.rows.size - tile.y : plan.height;
  const int64_t left = p.count - tile.first_mask;
  const int group = left < plan.group ? static_cast<int>(left) : plan.group;
  const Share share = share_of(p, tile, kTaps, group, static_cast<int>(job), s);
  if (share.count <= 0) return;
  if (!share.met) return clear(p, plan, tile, s, share.count);
  fill_tables(p, plan, kTaps, tile, s);
  load_coefficients(p, tile, s, 0, share.count);
  __syncthreads();
  const int low_width = s.column_first[column_at(tile.width - 1)] + kTaps;
  const int low_height = s.rows[tile.height - 1].first + kTaps;
  low_logits<T>(p, tile, s, low_width, low_height, share.count);
  __syncthreads();
  make<kTaps, kMasks>(p, plan, tile, s, low_width, share.count);
}

template <typename T, int kTaps, int kMasks>
cudaError_t launch(const MasksParams& p, const MaskTile& tile, cudaStream_t stream) {
  constexpr int64_t kMost = 2147483647;
  const int64_t blocks = tile.columns * tile.rows * tile.groups * tile.jobs * p.images;
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
    default:  // the glue converts other types to float32
      return launch_taps<float>(params, tile, stream);
  }
}

}  // namespace torch_fastdet::core
