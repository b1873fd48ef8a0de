// Decode rectangles of packed JPEGs on the GPU in four kernels. "prepare" builds the look-up tables and lists the
// segments to decode. In "entropy" each thread decodes a segment, and a warp writes whole blocks of coefficients. In
// "transform" each thread computes the samples of a block. In "color" each thread computes a few rows of 8 pixels.
//
// Only "prepare" reads the rows of a plan. It skips an invalid row, so that the other kernels never see it.
#include <cuda_pipeline_primitives.h>

#include "core/common/device.cuh"
#include "core/jpeg/jpeg.h"
#include "core/jpeg/jpeg_math.h"
#include "core/jpeg/jpeg_plan.h"

namespace torch_fastdet::core {
namespace {

constexpr uint32_t kNone = 0xffffffffu;
constexpr int kPrepareThreads = 256, kTransformThreads = 128, kTransformParts = 4, kColorThreads = 128;
constexpr int kStride = kJpegBlock + 8;  // element stride of a block in shared memory; lanes start in different banks

struct Memory {
  JpegState* states;
  JpegLookup* lookups;
  uint32_t* group_images;
  uint32_t* tile_images;
  JpegSlot* slots;
  uint8_t* decoded;
};

__device__ __forceinline__ Memory memory_of(const JpegParams& p) {
  const JpegWorkspace w(p.images, p.groups, p.tiles);
  return {reinterpret_cast<JpegState*>(p.workspace + w.states),
          reinterpret_cast<JpegLookup*>(p.workspace + w.lookups),
          reinterpret_cast<uint32_t*>(p.workspace + w.group_images),
          reinterpret_cast<uint32_t*>(p.workspace + w.tile_images),
          reinterpret_cast<JpegSlot*>(p.workspace + w.slots),
          p.workspace + w.end};
}

// Copy to or from shared memory with all threads of the block, 16 bytes at a time.
template <int kThreads>
__device__ __forceinline__ void copy_by_block(void* to, const void* from, int bytes) {
  for (int i = threadIdx.x; i < bytes / static_cast<int>(sizeof(uint4)); i += kThreads) {
    static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
  }
}

__device__ __forceinline__ JpegRect rect_of(const int64_t* row) {
  return {static_cast<int>(row[kJpegX]), static_cast<int>(row[kJpegY]), static_cast<int>(row[kJpegWidth]),
          static_cast<int>(row[kJpegHeight])};
}

// Return whether everything in a row is in range, and set its region if so. The header lies within the storage.
__device__ bool is_sound(const JpegParams& p, const int64_t* row, const JpegHeader& h, JpegRegion& region) {
  const int64_t width = row[kJpegWidth], height = row[kJpegHeight];
  if (width <= 0 || height <= 0 || !jpeg_is_sound(h, p.storage_bytes - row[kJpegOffset])) return false;
  const int64_t x = row[kJpegX], y = row[kJpegY], out = row[kJpegOut], pitch = row[kJpegPitch];
  if (x < 0 || y < 0 || width > jpeg_shown_width(h) - x || height > jpeg_shown_height(h) - y) return false;
  if (pitch < 3 * width || pitch > p.out_bytes || out < 0 || out > p.out_bytes) return false;
  if ((height - 1) * pitch + 3 * width > p.out_bytes - out) return false;
  const int64_t groups = row[kJpegGroups], tiles = row[kJpegTiles];
  if (groups < 1 || row[kJpegFirstGroup] < 0 || row[kJpegFirstGroup] > p.groups - groups) return false;
  region = jpeg_region(h, rect_of(row));
  if (tiles != int64_t{jpeg_tile_columns(region)} * jpeg_tile_rows(region)) return false;
  if (row[kJpegFirstTile] < 0 || row[kJpegFirstTile] > p.tiles - tiles) return false;
  const int64_t planes = row[kJpegPlanes], coefficients = row[kJpegCoefficients];
  const int64_t block_bytes = kJpegBlock * sizeof(int16_t);
  return planes >= 0 && coefficients >= 0 && planes % 16 == 0 && coefficients % 16 == 0 &&
         planes <= p.decoded_bytes - int64_t{region.mcus()} * h.mcu_blocks * kJpegBlock &&
         coefficients <= p.decoded_bytes - (groups * kJpegGroup << h.segment_bits) * h.mcu_blocks * block_bytes;
}

// Return the needed MCUs of a segment as bits: bit m is MCU m. The segment's first MCU is (x, y).
__device__ __forceinline__ uint32_t seen_mcus(const JpegRegion& region, int columns, int x, int y, int count) {
  uint32_t seen = 0;
  for (int m = 0; m < count; ++m) {
    const bool is_seen = y >= region.mcu_y0 && y < region.mcu_y1 && x >= region.mcu_x0 && x < region.mcu_x1;
    seen |= uint32_t{is_seen} << m;
    if (++x == columns) x = 0, ++y;
  }
  return seen;
}

// Fill in everything except the header, the region and the quantizers.
__device__ void make_state(JpegState& state, const JpegParams& p, const int64_t* row, const Memory& memory) {
  const JpegHeader& h = state.header;
  state.packed = p.storage + row[kJpegOffset];
  state.turn = jpeg_turn(h, rect_of(row), row[kJpegPitch]);
  state.out = p.out + row[kJpegOut] + state.turn.first;
  state.coefficients = reinterpret_cast<int16_t*>(memory.decoded + row[kJpegCoefficients]);
  state.first_group = row[kJpegFirstGroup], state.first_tile = row[kJpegFirstTile];
  state.tile_columns = jpeg_tile_columns(state.region);
  const uint8_t* plane = memory.decoded + row[kJpegPlanes];
  int block = 0;
  for (int i = 0; i < h.components; ++i) {
    const JpegComponent& c = h.component[i];
    state.planes[i] = jpeg_plane(c, state.region, plane);
    plane += int64_t{state.region.plane_width(c)} * state.region.plane_height(c);
    for (int j = 0; j < c.h * c.v; ++j, ++block) {
      state.component[block] = static_cast<uint8_t>(i);
      state.column[block] = static_cast<uint8_t>(j % c.h), state.row[block] = static_cast<uint8_t>(j / c.h);
    }
  }
}

__global__ void __launch_bounds__(kPrepareThreads) jpeg_prepare(JpegParams p) {
  __shared__ JpegState state;
  __shared__ int64_t row[kJpegColumns];
  __shared__ bool sound;
  __shared__ uint32_t warps[kPrepareThreads / kWarp];
  const Memory memory = memory_of(p);
  const int64_t* const plan = p.plan + static_cast<int64_t>(blockIdx.x) * kJpegColumns;
  if (threadIdx.x < kJpegColumns) row[threadIdx.x] = plan[threadIdx.x];
  __syncthreads();
  const int64_t offset = row[kJpegOffset];
  if (offset < 0 || offset % kJpegAlignment || offset > p.storage_bytes - kJpegHeaderBytes) return;
  copy_by_block<kPrepareThreads>(&state.header, p.storage + offset, kJpegHeaderBytes);
  __syncthreads();
  if (threadIdx.x == 0) {
    sound = is_sound(p, row, state.header, state.region);
    if (sound) make_state(state, p, row, memory);
  }
  __syncthreads();
  if (!sound) return;
  const JpegHeader& h = state.header;
  const auto* quantizers = reinterpret_cast<const uint16_t*>(state.packed + h.quantizers);
  for (int i = threadIdx.x; i < h.components * kJpegBlock; i += kPrepareThreads) {
    state.quantizers[i / kJpegBlock][i % kJpegBlock] = quantizers[i];
  }
  __syncthreads();
  copy_by_block<kPrepareThreads>(memory.states + blockIdx.x, &state, sizeof state);
  for (int64_t i = threadIdx.x; i < row[kJpegGroups]; i += kPrepareThreads) {
    memory.group_images[row[kJpegFirstGroup] + i] = blockIdx.x;
  }
  for (int64_t i = threadIdx.x; i < row[kJpegTiles]; i += kPrepareThreads) {
    memory.tile_images[row[kJpegFirstTile] + i] = blockIdx.x;
  }

  for (int i = 0; i < h.tables; ++i) {
    bool is_ac = false;
    for (int j = 0; j < h.components; ++j) is_ac = is_ac || h.component[j].ac == i;
    const uint8_t* table = state.packed + h.table[i];
    alignas(16) uint8_t counts[16];  // in registers
    *reinterpret_cast<uint4*>(counts) = *reinterpret_cast<const uint4*>(table);
    JpegLookup& lookup = memory.lookups[static_cast<int64_t>(blockIdx.x) * kJpegMaxTables + i];
    // The bytes after the table are not symbols, but they are readable: a table is never the last part.
    const uint32_t symbols = h.bytes - h.table[i] - 16;
    for (uint32_t j = threadIdx.x; j < sizeof lookup.symbols; j += kPrepareThreads) {
      lookup.symbols[j] = j < symbols ? table[16 + j] : 0;
    }
    if (static_cast<int>(threadIdx.x) == i * kWarp) jpeg_long_codes(lookup, counts, is_ac);
    for (uint32_t j = threadIdx.x; j < 1u << kJpegFastBits; j += kPrepareThreads) {
      lookup.fast[j] = jpeg_fast_entry(counts, table + 16, symbols, is_ac, j);
    }
  }

  const JpegRegion& region = state.region;
  const int columns = static_cast<int>(h.mcu_columns);
  const uint32_t begin = jpeg_segment_of(h, region.mcu_y0 * h.mcu_columns + region.mcu_x0);
  const uint32_t end = jpeg_segment_of(h, (region.mcu_y1 - 1) * h.mcu_columns + region.mcu_x1 - 1) + 1;
  JpegSlot* const slots = memory.slots + row[kJpegFirstGroup] * kJpegGroup;
  const auto room = static_cast<uint32_t>(row[kJpegGroups] * kJpegGroup);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint32_t count = 0;
  for (uint32_t first = begin; first < end; first += kPrepareThreads) {
    JpegSlot slot{first + threadIdx.x, 0, 0, 0, 0};
    if (slot.segment < end) {
      const JpegSpan span = jpeg_segment_span(h, slot.segment);
      slot.x = static_cast<uint16_t>(span.begin % h.mcu_columns),
      slot.y = static_cast<uint16_t>(span.begin / h.mcu_columns);
      slot.seen = seen_mcus(region, columns, slot.x, slot.y, static_cast<int>(span.end - span.begin));
    }
    const uint32_t needed_lanes = __ballot_sync(kFullWarp, slot.seen);
    if (lane == 0) warps[warp] = __popc(needed_lanes);
    __syncthreads();
    uint32_t place = count + __popc(needed_lanes & ((1u << lane) - 1));
    for (int i = 0; i < kPrepareThreads / kWarp; ++i) {
      if (i < warp) place += warps[i];
      count += warps[i];
    }
    if (slot.seen && place < room) slots[place] = slot;
    __syncthreads();
  }
  for (uint32_t i = count + threadIdx.x; i < room; i += kPrepareThreads) slots[i] = JpegSlot{0, 0, 0, 0, 0};
}

// Read the bits of a packed scan through a ring in shared memory, which is filled one block of codes ahead. A lane that
// waited for memory would stall the whole warp, and in nearly every round some lane needs a word. Reading past the end
// of the scan repeats its last four words.
class DeviceBits {
 public:
  static constexpr uint32_t kRing = 16, kRingStride = kRing + 4;  // words; lanes begin in different banks

  __device__ __forceinline__ DeviceBits(const uint32_t* words, uint32_t count, uint32_t bit, uint32_t* ring)
      : words_(words), ring_(ring), last_(count / 4 - 1), asked_(bit / 128 * 4), next_(bit / 32), shift_(bit % 32) {
    fetch();
    fetch();
    const uint32_t word = take();
    second_ = take();
    third_ = take();
    fourth_ = take();
    peek_ = shift_left(word, second_, shift_);
    after_ = shift_left(second_, third_, shift_);
  }

  __device__ __forceinline__ uint32_t peek() const { return peek_; }

  // `bits` must be below 32.
  __device__ __forceinline__ void skip(uint32_t bits) {
    peek_ = shift_left(peek_, after_, bits);
    shift_ += bits;
    const uint32_t moves = shift_ >= 32;
    shift_ &= 31;
    second_ = moves ? third_ : second_;
    third_ = moves ? fourth_ : third_;
    after_ = shift_left(second_, third_, shift_);
    while (moves && next_ == ready_) fetch();
      // Load the word into its register only if it is needed, so that nothing in this round waits for it.
#ifdef __CUDA_ARCH__
    asm volatile("{ .reg .pred moves; setp.ne.u32 moves, %2, 0; @moves ld.shared.u32 %0, [%1]; }"
                 : "+r"(fourth_)
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(ring_ + next_ % kRing))), "r"(moves));
#else
    if (moves) fourth_ = ring_[next_ % kRing];
#endif
    next_ += moves;
  }

  // Wait for the words requested earlier, and request as many as fit in the ring.
  __device__ __forceinline__ void fetch() {
    __pipeline_wait_prior(0);
    ready_ = asked_;
#pragma unroll 1
    for (; asked_ < next_ / 4 * 4 + kRing; asked_ += 4) {
      const uint32_t from = asked_ / 4 < last_ ? asked_ / 4 : last_;
      __pipeline_memcpy_async(ring_ + asked_ % kRing, words_ + 4 * from, 16);
    }
    __pipeline_commit();
  }

 private:
  __device__ __forceinline__ uint32_t take() {
    return ring_[next_++ % kRing];
  }

  static __device__ __forceinline__ uint32_t shift_left(uint32_t upper, uint32_t lower, uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __funnelshift_l(lower, upper, bits);
#else
    return static_cast<uint32_t>((static_cast<uint64_t>(upper) << 32 | lower) << bits >> 32);
#endif
  }

  const uint32_t* words_;
  uint32_t* ring_;
  uint32_t last_;           // index of the scan's last group of four words
  uint32_t asked_, ready_;  // end of the words requested, and of those that arrived
  uint32_t next_, shift_;
  uint32_t peek_, after_;  // the next 64 bits
  uint32_t second_, third_, fourth_;
};

struct StoreInShared {
  static constexpr bool kAlways = true;  // the stride leaves space after a block, and a branch takes longer
  int16_t* block;
  __device__ __forceinline__ void operator()(uint32_t i, int value) const { block[i] = static_cast<int16_t>(value); }
};

// Keep only the look-ups of short codes in shared memory.
struct SharedLookup {
  const uint16_t* fast;
  const JpegLookup& all;
};
__device__ __forceinline__ uint32_t jpeg_long_entry(const SharedLookup& table, uint32_t bits) {
  return jpeg_long_entry(table.all, bits);
}

__global__ void __launch_bounds__(kJpegGroup) jpeg_entropy(JpegParams p) {
  __shared__ JpegState state;
  __shared__ alignas(16) uint16_t fast[kJpegMaxTables][1 << kJpegFastBits];
  __shared__ alignas(16) int16_t blocks[kJpegGroup * kStride];
  __shared__ alignas(16) uint32_t rings[kJpegGroup * DeviceBits::kRingStride];
  const Memory memory = memory_of(p);
  const uint32_t number = memory.group_images[blockIdx.x];
  if (number == kNone) return;
  const JpegSlot slot = memory.slots[static_cast<int64_t>(blockIdx.x) * kJpegGroup + threadIdx.x];
  const JpegLookup* const lookups = memory.lookups + static_cast<int64_t>(number) * kJpegMaxTables;
  copy_by_block<kJpegGroup>(&state, memory.states + number, kJpegStateShort);
  for (int i = 0; i < memory.states[number].header.tables; ++i) {
    copy_by_block<kJpegGroup>(fast[i], lookups[i].fast, sizeof fast[i]);
  }
  for (int i = threadIdx.x; i < kJpegGroup * kStride / 8; i += kJpegGroup) {
    reinterpret_cast<uint4*>(blocks)[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  const JpegHeader& h = state.header;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int predictor0 = 0, predictor1 = 0, predictor2 = 0;
  uint32_t start = 0;
  if (slot.seen) {
    const auto* starts = reinterpret_cast<const uint32_t*>(state.packed + h.starts);
    const auto* predictors = reinterpret_cast<const int16_t*>(state.packed + h.predictors);
    const int16_t* mine = predictors + static_cast<int64_t>(slot.segment) * h.components;
    predictor0 = mine[0];
    if (h.components == 3) predictor1 = mine[1], predictor2 = mine[2];
    start = starts[slot.segment];
  }
  DeviceBits bits(reinterpret_cast<const uint32_t*>(state.packed + h.scan), h.scan_words, start,
                  rings + threadIdx.x * DeviceBits::kRingStride);
  // Groups of eight lanes write and clear the blocks of the warp's lanes, four blocks at a time.
  int16_t* const of_warp = blocks + warp * kWarp * kStride;
  int16_t* const mine = of_warp + lane * kStride;
  int16_t* const from = of_warp + lane / 8 * kStride + lane % 8 * 8;
  const int mcu_blocks = h.mcu_blocks, of_segment = (mcu_blocks << h.segment_bits) * kJpegBlock;
  const int64_t segment = (blockIdx.x - state.first_group) * kJpegGroup + warp * kWarp + lane / 8;
  int16_t* to = state.coefficients + segment * of_segment + lane % 8 * 8;
  for (uint32_t seen = slot.seen; __any_sync(kFullWarp, seen); seen >>= 1) {  // this MCU and the next ones
    const uint32_t lanes = __ballot_sync(kFullWarp, seen & 1) >> lane / 8;
    for (int b = 0; b < mcu_blocks; ++b, to += kJpegBlock) {
      if (seen) {
        bits.fetch();
        const int component = state.component[b];
        int predictor = component == 0 ? predictor0 : component == 1 ? predictor1 : predictor2;
        const JpegComponent& c = h.component[component];
        jpeg_decode_block(bits, SharedLookup{fast[c.dc], lookups[c.dc]}, SharedLookup{fast[c.ac], lookups[c.ac]},
                          predictor, StoreInShared{mine});
        predictor0 = component == 0 ? predictor : predictor0;
        predictor1 = component == 1 ? predictor : predictor1;
        predictor2 = component == 2 ? predictor : predictor2;
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint4* const part = reinterpret_cast<uint4*>(from + i * 4 * kStride);
        const uint4 value = *part;
        *part = make_uint4(0, 0, 0, 0);
        if (lanes >> (i * 4) & 1) *reinterpret_cast<uint4*>(to + i * 4 * of_segment) = value;
      }
      __syncwarp();
    }
  }
}

__device__ __forceinline__ int half_of(const uint4& v, int i) {
  const uint32_t x = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
  return i % 2 ? static_cast<int32_t>(x) >> 16 : static_cast<int16_t>(x & 0xffff);
}

// Clamp four values to 0..255 and pack them into a word.
__device__ __forceinline__ uint32_t pack4(int a, int b, int c, int d) {
#ifdef __CUDA_ARCH__
  uint32_t upper, all;
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(upper) : "r"(d), "r"(c), "r"(0));
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(b), "r"(a), "r"(upper));
  return all;
#else
  return static_cast<uint32_t>(jpeg_clamp(a)) | static_cast<uint32_t>(jpeg_clamp(b)) << 8 |
         static_cast<uint32_t>(jpeg_clamp(c)) << 16 | static_cast<uint32_t>(jpeg_clamp(d)) << 24;
#endif
}

__device__ __forceinline__ void transform_block(const int16_t* in, const uint16_t* quantizers, uint8_t* out,
                                                int pitch) {
  int a[kJpegBlock];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 values = reinterpret_cast<const uint4*>(in)[i], factors = reinterpret_cast<const uint4*>(quantizers)[i];
#pragma unroll
    for (int j = 0; j < 8; ++j) a[jpeg_natural(8 * i + j)] = jpeg_dequantize(half_of(values, j), half_of(factors, j));
  }
  int any = 0;
#pragma unroll
  for (int i = 8; i < kJpegBlock; ++i) any |= a[i];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (any) {
      jpeg_idct8<11>(a[i], a[8 + i], a[16 + i], a[24 + i], a[32 + i], a[40 + i], a[48 + i], a[56 + i]);
    } else {
      const int value = jpeg_idct_flat_column(a[i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) a[8 * j + i] = value;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int* const x = a + 8 * i;
    jpeg_idct8<18>(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]);
    uint2 samples;
    samples.x = pack4(x[0] + 128, x[1] + 128, x[2] + 128, x[3] + 128);
    samples.y = pack4(x[4] + 128, x[5] + 128, x[6] + 128, x[7] + 128);
    *reinterpret_cast<uint2*>(out + static_cast<int64_t>(i) * pitch) = samples;
  }
}

__global__ void __launch_bounds__(kTransformThreads) jpeg_transform(JpegParams p) {
  constexpr int kWarps = kTransformThreads / kWarp, kStages = 2;
  __shared__ JpegState state;
  __shared__ alignas(16) JpegSlot slots[kJpegGroup];
  __shared__ alignas(16) int16_t stages[kWarps][kStages][kWarp * kStride];
  const Memory memory = memory_of(p);
  const uint32_t number = memory.group_images[blockIdx.x];
  if (number == kNone) return;
  copy_by_block<kTransformThreads>(&state, memory.states + number, sizeof state);
  copy_by_block<kTransformThreads>(slots, memory.slots + static_cast<int64_t>(blockIdx.x) * kJpegGroup, sizeof slots);
  __syncthreads();
  const JpegHeader& h = state.header;
  const JpegRegion& region = state.region;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) - state.first_group) * kJpegGroup;
  const int16_t* const coefficients = state.coefficients + (first << h.segment_bits) * h.mcu_blocks * kJpegBlock;
  // Blocks are in the order of their coefficients. Each blockIdx.y takes a part of them, and a warp 32 at a time.
  const int blocks = h.mcu_blocks, count = (kJpegGroup << h.segment_bits) / kTransformParts * blocks;
  const int reciprocal = 65536 / blocks + 1;  // exact, because i < 2,560 and blocks <= 10
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int begin = blockIdx.y * count, end = begin + count;

  // Return whether block i is needed, and set its MCU.
  const auto find = [&](int i, int& mcu) {
    mcu = i * reciprocal >> 16;
    return i < end && slots[mcu >> h.segment_bits].seen >> (mcu & ((1 << h.segment_bits) - 1)) & 1;
  };
  // Load the coefficients of the next 32 blocks while the current ones are transformed.
  const auto fetch = [&](int at, int stage) {
    int mcu;
    const uint32_t seen = __ballot_sync(kFullWarp, find(at + lane, mcu)) >> lane / 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int block = j * 4 + lane / 8, part = lane % 8 * 8;
      if (seen >> (j * 4) & 1) {
        __pipeline_memcpy_async(stages[warp][stage] + block * kStride + part,
                                coefficients + static_cast<int64_t>(at + block) * kJpegBlock + part, 16);
      }
    }
    __pipeline_commit();
  };
  int at = begin + warp * kWarp, stage = 0;
  fetch(at, stage);
  for (; at < end; at += kTransformThreads, stage ^= 1) {
    fetch(at + kTransformThreads, stage ^ 1);
    __pipeline_wait_prior(1);
    __syncwarp();
    const int i = at + lane;
    int mcu;
    if (find(i, mcu)) {
      const int block = i - mcu * blocks;
      const JpegSlot& slot = slots[mcu >> h.segment_bits];
      int x = slot.x + (mcu & ((1 << h.segment_bits) - 1)), y = slot.y;
      while (x >= static_cast<int>(h.mcu_columns)) x -= static_cast<int>(h.mcu_columns), ++y;
      const int component = state.component[block];
      const JpegComponent& c = h.component[component];
      const JpegPlane& plane = state.planes[component];
      x = (x - region.mcu_x0) * c.h + state.column[block], y = (y - region.mcu_y0) * c.v + state.row[block];
      uint8_t* const out = const_cast<uint8_t*>(plane.data) + int64_t{y} * 8 * plane.pitch + x * 8;
      transform_block(stages[warp][stage] + lane * kStride, state.quantizers[component], out, plane.pitch);
    }
    __syncwarp();
  }
}

// Hold eight samples of two rows, four in each word.
struct Samples {
  uint2 row[2];
};
__device__ __forceinline__ int sample_of(const uint2& row, int i) {
  return static_cast<int>((i < 4 ? row.x : row.y) >> (8 * (i & 3)) & 255);
}
__device__ __forceinline__ uint2 pack8(const int (&x)[8]) {  // the values are bytes
  return make_uint2(x[0] | x[1] << 8 | x[2] << 16 | x[3] << 24, x[4] | x[5] << 8 | x[6] << 16 | x[7] << 24);
}

// Load samples x - 1 to x + 4 of a row.
__device__ __forceinline__ void load6(const JpegPlane& plane, const uint8_t* row, int x, int (&out)[6]) {
  if (x > plane.x0 && x + 4 <= plane.last_x) {
    const uint8_t* const at = row + (x - plane.x0);
    const uint32_t middle = *reinterpret_cast<const uint32_t*>(at);
    out[0] = at[-1], out[5] = at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) out[1 + i] = static_cast<int>(middle >> (8 * i) & 255);
  } else {
#pragma unroll
    for (int i = 0; i < 6; ++i) out[i] = row[jpeg_plane_column(plane, x - 1 + i)];
  }
}

// Return pixels [x, x + 8) of rows y and y + 1. x is a multiple of 8, and y is even.
__device__ __forceinline__ Samples upsample(const JpegComponent& c, const JpegPlane& plane, int x, int y) {
  Samples out;
  if (c.upsampling == JpegUpsampling::kBoth) {
    int mine[6], near[6], pixels[8];
    load6(plane, jpeg_plane_row(plane, y / 2), x / 2, mine);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      load6(plane, jpeg_plane_row(plane, y / 2 - 1 + 2 * r), x / 2, near);
#pragma unroll
      for (int i = 0; i < 6; ++i) near[i] += 3 * mine[i];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pixels[2 * i] = jpeg_between_both(near[1 + i], near[i], false);
        pixels[2 * i + 1] = jpeg_between_both(near[1 + i], near[2 + i], true);
      }
      out.row[r] = pack8(pixels);
    }
    return out;
  }
  if (c.ratio_x == 1 && c.ratio_y == 1) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      out.row[r] = *reinterpret_cast<const uint2*>(jpeg_plane_row(plane, y + r) + (x - plane.x0));
    }
    return out;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int sample_y = (y + r) / c.ratio_y;
    const uint8_t* const row = jpeg_plane_row(plane, sample_y);
    int pixels[8];
    if (c.upsampling == JpegUpsampling::kColumns) {
      int mine[6];
      load6(plane, row, x / 2, mine);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pixels[2 * i] = jpeg_between(mine[1 + i], mine[i], false);
        pixels[2 * i + 1] = jpeg_between(mine[1 + i], mine[2 + i], true);
      }
    } else if (c.ratio_x == 1) {
      const uint2 mine = *reinterpret_cast<const uint2*>(row + (x - plane.x0));
      if (c.upsampling == JpegUpsampling::kBox) {
        out.row[r] = mine;
        continue;
      }
      const uint8_t* const other = jpeg_plane_row(plane, sample_y - 1 + 2 * r);
      const uint2 near = *reinterpret_cast<const uint2*>(other + (x - plane.x0));
#pragma unroll
      for (int i = 0; i < 8; ++i) pixels[i] = jpeg_between(sample_of(mine, i), sample_of(near, i), r);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) pixels[i] = row[jpeg_plane_column(plane, (x + i) / c.ratio_x)];
    }
    out.row[r] = pack8(pixels);
  }
  return out;
}

// Write pixels [x, x + 8) of rows y and y + 1 as far as they lie in the region.
__device__ __forceinline__ void color_pixels(const JpegState& state, int x, int y) {
  const JpegHeader& h = state.header;
  const JpegRegion& region = state.region;
  Samples samples[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (i < h.components) samples[i] = upsample(h.component[i], state.planes[i], x, y);
  }
  const bool whole = x >= region.x0 && x + 8 <= region.x1;
  const int64_t dx = state.turn.dx;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (y + r < region.y0 || y + r >= region.y1) continue;
    int channels[24];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int first = sample_of(samples[0].row[r], i);
      int* const pixel = channels + 3 * i;
      if (h.color == JpegColor::kGrey) {
        pixel[0] = pixel[1] = pixel[2] = first;
        continue;
      }
      const int second = sample_of(samples[1].row[r], i), third = sample_of(samples[2].row[r], i);
      if (h.color == JpegColor::kYcc) {
        jpeg_ycc_to_bgr(first, second, third, pixel[0], pixel[1], pixel[2]);
      } else {
        pixel[0] = third, pixel[1] = second, pixel[2] = first;
      }
    }
    uint32_t words[6];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      words[i] = pack4(channels[4 * i], channels[4 * i + 1], channels[4 * i + 2], channels[4 * i + 3]);
    }
    uint8_t* const out = state.out + x * dx + (y + r) * state.turn.dy;
    if (whole && dx == 3 && reinterpret_cast<uintptr_t>(out) % 8 == 0) {
#pragma unroll
      for (int i = 0; i < 3; ++i) reinterpret_cast<uint2*>(out)[i] = make_uint2(words[2 * i], words[2 * i + 1]);
    } else if (whole && dx == 3 && reinterpret_cast<uintptr_t>(out) % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 6; ++i) reinterpret_cast<uint32_t*>(out)[i] = words[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (x + i < region.x0 || x + i >= region.x1) continue;
#pragma unroll
        for (int k = 0; k < 3; ++k) {
          out[i * dx + k] = static_cast<uint8_t>(words[(3 * i + k) / 4] >> (8 * ((3 * i + k) % 4)));
        }
      }
    }
  }
}

// Return whether the file is of the usual kind: YCbCr, 4:2:0, not rotated.
__device__ __forceinline__ bool is_usual(const JpegState& state) {
  const JpegComponent* const c = state.header.component;
  return state.header.color == JpegColor::kYcc && c[0].ratio_x == 1 && c[0].ratio_y == 1 &&
         c[1].upsampling == JpegUpsampling::kBoth && c[2].upsampling == JpegUpsampling::kBoth && state.turn.dx == 3;
}

// Select bytes of a (0 to 3) and b (4 to 7) by four bits of the selector each; 8 more replicates the sign bit.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "n"(kSelector));
  return out;
#else
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t s = kSelector >> 4 * i & 15, byte = (s & 4 ? b : a) >> 8 * (s & 3) & 255;
    out |= (s & 8 ? byte >> 7 ? 255 : 0 : byte) << 8 * i;
  }
  return out;
#endif
}

// Multiplying by kPair copies a value to both halves of a word: Cb is the lower half, Cr the upper one.
constexpr uint32_t kPair = 0x10001;

// Locate the chroma samples x - 1 to x + 4 of a row for one thread of color_usual.
struct ChromaColumns {
  const uint8_t *cb, *cr;  // sample x in the plane's first row
  int pitch, first, last;  // rows
  int left, right;         // -1 and 4, or the nearest columns inside the image

  __device__ __forceinline__ ChromaColumns(const JpegPlane& b, const JpegPlane& r, int x)
      : cb(b.data + (x - b.x0)),
        cr(r.data + (x - b.x0)),
        pitch(b.pitch),
        first(b.y0),
        last(b.last_y),
        left(x > b.x0 ? -1 : 0),
        right(x + 4 <= b.last_x ? 4 : 3) {}

  __device__ __forceinline__ void load(int y, uint32_t (&out)[6]) const {
    const int row = (jpeg_clamp_to(y, first, last) - first) * pitch;
    const uint8_t *b = cb + row, *r = cr + row;
    out[0] = __ldg(b + left) | __ldg(r + left) << 16;
    out[5] = __ldg(b + right) | __ldg(r + right) << 16;
    const uint32_t bs = __ldg(reinterpret_cast<const uint32_t*>(b)), rs = __ldg(reinterpret_cast<const uint32_t*>(r));
    const uint32_t lower = permute<0x5410>(bs, rs), upper = permute<0x7632>(bs, rs);
    out[1] = lower & 255 * kPair, out[2] = lower >> 8 & 255 * kPair;
    out[3] = upper & 255 * kPair, out[4] = upper >> 8 & 255 * kPair;
  }
};

// Color pixel i of eight: apply jpeg_between_both to both halves, in 16ths, then jpeg_ycc_to_bgr. `half` is 0x8000.
template <int i>
__device__ __forceinline__ void color_pixel(const uint32_t (&sums)[6], uint32_t lights, uint32_t half, int* out) {
  uint32_t pair = 3 * sums[i / 2 + 1] + sums[i % 2 ? i / 2 + 2 : i / 2] - i % 2 * 16 * kPair;
  pair ^= 0x8000 * kPair;  // as signed bytes, the upper bytes are now Cb - 128 and Cr - 128
  const int blue = static_cast<int>(permute<0x9991>(pair, 0)), red = static_cast<int>(pair) >> 24;
  const int light = static_cast<int>(permute<0x4054 | i % 4 << 8>(lights, half));
  out[0] = (116130 * blue + light) >> 16;
  out[1] = (-22554 * blue + (-46802 * red + light)) >> 16;
  out[2] = (91881 * red + light) >> 16;
}

// Write pixels [x, x + 8) of rows [y, end) of a usual file. y is even, and Cb and Cr have a sample for each of them.
__device__ __forceinline__ void color_usual(const JpegState& state, int x, int y, int end) {
  const ChromaColumns chroma(state.planes[1], state.planes[2], x / 2);
  const JpegPlane luma = state.planes[0];
  const uint8_t* lights = luma.data + static_cast<int64_t>(y - luma.y0) * luma.pitch + (x - luma.x0);
  const int64_t dy = state.turn.dy;
  uint8_t* out = state.out + x * 3 + y * dy;
  const int first = state.region.y0;
  const uint32_t half = 0x8000 * blockDim.y;  // blockDim.y is 1; the compiler would load a constant for each pixel
  uint32_t above[6], here[6], below[6];
  chroma.load(y / 2 - 1, above);
  chroma.load(y / 2, here);
#pragma unroll 1
  for (; y < end; y += 2) {
    uint2 light[2];
#pragma unroll
    for (int r = 0; r < 2; ++r, lights += luma.pitch) light[r] = __ldg(reinterpret_cast<const uint2*>(lights));
    chroma.load(y / 2 + 1, below);
#pragma unroll
    for (int r = 0; r < 2; ++r, out += dy) {
      if (y + r < first || y + r >= end) continue;
      uint32_t sums[6];
#pragma unroll
      for (int i = 0; i < 6; ++i) sums[i] = 48 * here[i] + (16 * (r ? below[i] : above[i]) + 32 * kPair);
      int c[24];
      color_pixel<0>(sums, light[r].x, half, c), color_pixel<1>(sums, light[r].x, half, c + 3);
      color_pixel<2>(sums, light[r].x, half, c + 6), color_pixel<3>(sums, light[r].x, half, c + 9);
      color_pixel<4>(sums, light[r].y, half, c + 12), color_pixel<5>(sums, light[r].y, half, c + 15);
      color_pixel<6>(sums, light[r].y, half, c + 18), color_pixel<7>(sums, light[r].y, half, c + 21);
#pragma unroll
      for (int i = 0; i < 24; i += 8) {
        const uint2 words = {pack4(c[i], c[i + 1], c[i + 2], c[i + 3]), pack4(c[i + 4], c[i + 5], c[i + 6], c[i + 7])};
        reinterpret_cast<uint2*>(out)[i / 8] = words;
      }
    }
#pragma unroll
    for (int i = 0; i < 6; ++i) above[i] = here[i], here[i] = below[i];
  }
}

__global__ void __launch_bounds__(kColorThreads) jpeg_color(JpegParams p) {
  __shared__ JpegState state;
  const Memory memory = memory_of(p);
  const uint32_t number = memory.tile_images[blockIdx.x];
  if (number == kNone) return;
  copy_by_block<kColorThreads>(&state, memory.states + number, kJpegStateShort);
  __syncthreads();
  const JpegRegion& region = state.region;
  const int tile = static_cast<int>(static_cast<int64_t>(blockIdx.x) - state.first_tile);
  const int tile_y = tile / state.tile_columns, tile_x = tile - tile_y * state.tile_columns;
  constexpr int kColumns = kJpegTileWidth / 8, kRows = kJpegTileHeight / (kColorThreads / kColumns);
  static_assert(kRows % 2 == 0, "rows are made two at a time");
  const int x = (region.x0 / kJpegTileWidth + tile_x) * kJpegTileWidth + threadIdx.x % kColumns * 8;
  const int top = (region.y0 / kJpegTileHeight + tile_y) * kJpegTileHeight + threadIdx.x / kColumns * kRows;
  const int y = top > region.y0 ? top : region.y0 / 2 * 2, end = top + kRows < region.y1 ? top + kRows : region.y1;
  if (x >= region.x1 || x + 8 <= region.x0 || y >= end) return;
  const bool whole = x >= region.x0 && x + 8 <= region.x1;
  const bool aligned = (reinterpret_cast<uintptr_t>(state.out) | static_cast<uintptr_t>(state.turn.dy)) % 8 == 0;
  if (whole && aligned && is_usual(state) && x / 2 + 3 <= state.planes[1].last_x) {
    color_usual(state, x, y, end);
  } else {
    for (int row = y; row < end; row += 2) color_pixels(state, x, row);
  }
}

}  // namespace

cudaError_t launch_jpeg_decode(const JpegParams& p, cudaStream_t stream) {
  if (!p.images || !p.groups || !p.tiles) return cudaSuccess;
  const JpegWorkspace w(p.images, p.groups, p.tiles);
  // Mark all groups and tiles as unused. jpeg_prepare assigns those of valid rows.
  const auto maps = static_cast<size_t>(w.slots - w.group_images);
  if (const cudaError_t error = cudaMemsetAsync(p.workspace + w.group_images, 0xff, maps, stream)) return error;
  jpeg_prepare<<<static_cast<unsigned>(p.images), kPrepareThreads, 0, stream>>>(p);
  jpeg_entropy<<<static_cast<unsigned>(p.groups), kJpegGroup, 0, stream>>>(p);
  jpeg_transform<<<dim3(static_cast<unsigned>(p.groups), kTransformParts), kTransformThreads, 0, stream>>>(p);
  jpeg_color<<<static_cast<unsigned>(p.tiles), kColorThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace torch_fastdet::core
