// Compute exact greedy suppression with an early stop. One block per image tests the next chunk of candidates, in order
// of confidence, against the kept list in shared memory, then within itself by a bit matrix, until max_detections are
// kept or no candidate is left. It merges a chunk from up to kMergedRuns sorted runs, only as far as needed.
#include "core/nms/nms_device.cuh"
#include "core/nms/nms_rows.cuh"

namespace torch_fastdet::core {

namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
static_assert(kSelfSorted == kThreads);

// Return the key at `position` of the merge of two sorted lists, of which `a_count` and `b_count` keys are known.
template <typename Key>
__device__ __forceinline__ Key merged_at(const Key* a, int a_count, const Key* b, int b_count, int position) {
  int low = position > b_count ? position - b_count : 0, high = position < a_count ? position : a_count;
  while (low < high) {  // find how many keys before `position` come from a
    const int half = (low + high) / 2;
    if (a[half] < b[position - 1 - half]) {
      low = half + 1;
    } else {
      high = half;
    }
  }
  const int from_b = position - low;
  if (low >= a_count) return from_b < b_count ? b[from_b] : ~Key(0);
  if (from_b >= b_count) return a[low];
  return a[low] < b[from_b] ? a[low] : b[from_b];
}

__device__ __forceinline__ uint64_t shuffle_xor(uint64_t key, int step) {
  return __shfl_xor_sync(kFullWarp, static_cast<unsigned long long>(key), step);
}

__device__ __forceinline__ unsigned __int128 shuffle_xor(unsigned __int128 key, int step) {
  const uint64_t high = shuffle_xor(static_cast<uint64_t>(key >> 64), step);
  return static_cast<unsigned __int128>(high) << 64 | shuffle_xor(static_cast<uint64_t>(key), step);
}

template <typename A>
struct Kept {
  static constexpr int kWords = Keys<A>::kChunk / 32;
  CornerBox<A> box[kSharedDetections];
  int32_t box_class[kSharedDetections];
  int64_t cursor[kMergedRuns];
  uint32_t alive[kWords];  // candidates of the chunk that no kept box suppresses
  uint32_t keeps[kWords];  // survivors of the chunk that are kept
  int32_t before[kWords];  // detections kept before each 32 survivors
  int32_t total;           // detections kept
};

// A chunk reuses the memory in which the runs were merged.
template <typename A>
struct Chunk {
  static constexpr int kSize = Keys<A>::kChunk;
  CornerBox<A> box[kSize];
  int32_t box_class[kSize];
  uint32_t earlier[kSize / 32][kSize];  // bit j of [w][i]: survivor w * 32 + j suppresses survivor i if it is kept
};

// Sort one key per thread. Neighbours within a warp exchange keys by shuffles, others through `shared`.
template <typename Key>
__device__ __forceinline__ Key sort_block(Key key, Key* shared) {
  const int thread = threadIdx.x;
  for (int size = 2; size <= kThreads; size <<= 1) {
    for (int step = size / 2; step; step >>= 1) {
      Key other;
      if (step >= 32) {
        __syncthreads();
        shared[thread] = key;
        __syncthreads();
        other = shared[thread ^ step];
      } else {
        other = shuffle_xor(key, step);
      }
      const bool ascending = !(thread & size), first = !(thread & step);
      const bool takes_smaller = ascending == first;
      key = takes_smaller == (other < key) ? other : key;
    }
  }
  return key;
}

template <typename A>
struct Candidate {
  CornerBox<A> box{}, placed;  // the box that is output, and the one that is compared
  A confidence = 0;
  int32_t box_class = 0;
  uint32_t anchor = 0;
  bool alive = false;
};

// A block processes its image. The whole block takes each step; all are inlined, which keeps the members in registers.
template <typename A>
struct Suppression {
  using Key = key_of<A>;
  static constexpr int kChunk = Keys<A>::kChunk, kWords = kChunk / 32;
  static constexpr int kShares = kThreads / kChunk;  // threads that test one candidate against the kept list
  static constexpr int kBatch = 8;

  const NmsKernel& p;
  Kept<A>& s;
  Chunk<A>& chunk;
  Key* const windows;  // [runs][kChunk], overlapping the later chunk
  const int64_t image;
  const int thread, lane, warp;
  const uint32_t classes;
  const int64_t buffered;
  const bool promoted;
  Key* const keys;
  const int64_t length;  // keys in a sorted run
  const int runs;
  const A threshold, offset;
  const bool same_class;
  const CornerBox<A> nothing;

  __device__ __forceinline__ Suppression(const NmsKernel& p, Kept<A>& s, Chunk<A>& chunk, int64_t image)
      : p(p),
        s(s),
        chunk(chunk),
        windows(reinterpret_cast<Key*>(&chunk)),
        image(image),
        thread(threadIdx.x),
        lane(thread & 31),
        warp(thread >> 5),
        classes(static_cast<uint32_t>(p.source.classes)),
        buffered(p.buffered(image)),
        promoted(p.is_promoted(image)),
        keys(p.at<Key>(p.merges & 1 ? p.other_keys : p.keys) + image * p.capacity),
        length(static_cast<int64_t>(Keys<A>::kTile) << p.merges),
        runs(static_cast<int>(ceil_div(buffered, length))),
        threshold(A(p.options.iou)),
        offset(p.options.class_rule == ClassRule::kOffset ? A(p.options.max_wh) : A(0)),
        same_class(p.options.class_rule == ClassRule::kExact),
        nothing(proper_or_void(CornerBox<A>{})) {}

  __device__ __forceinline__ void start() const {
    if (thread < kMergedRuns) s.cursor[thread] = 0;
    // Tests read the list in batches and may read past its end.
    for (int i = thread; i < kSharedDetections; i += kThreads) s.box[i] = nothing;
    if (p.sorts_small && buffered <= kSelfSorted && buffered > 0) {
      const Key sorted = sort_block(thread < buffered ? keys[thread] : ~Key(0), windows);
      if (thread < buffered) keys[thread] = sorted;
    }
  }

  // Return the next `count` keys in order, one per thread.
  __device__ __forceinline__ Key next_keys(int count) const {
    Key key = ~Key(0);
    if (runs == 1) {
      if (thread < count) key = keys[s.cursor[0] + thread];
      __syncthreads();
      if (thread == 0) s.cursor[0] += count;
      return key;
    }
    for (int i = thread; i < runs * kChunk; i += kThreads) {
      const int run = i / kChunk, at = i - run * kChunk;
      const int64_t start = run * length;
      const int64_t size = buffered - start < length ? buffered - start : length;
      const int64_t position = s.cursor[run] + at;
      windows[i] = position < size ? keys[start + position] : ~Key(0);
    }
    const Key* merged = merge_windows();
    __syncthreads();
    if (thread < count) key = merged[thread];
    advance_cursors(merged[count - 1]);
    __syncthreads();
    return key;
  }

  // Merge the windows in pairs, and return the first kChunk keys of all.
  __device__ __forceinline__ const Key* merge_windows() const {
    Key* level = windows;
    Key* other = windows + runs * kChunk;
    for (int lists = runs; lists > 1; lists = (lists + 1) / 2) {
      __syncthreads();
      const int merged = (lists + 1) / 2;
      for (int i = thread; i < merged * kChunk; i += kThreads) {
        const int pair = i / kChunk, at = i - pair * kChunk;
        const Key* a = level + 2 * pair * kChunk;
        other[i] = 2 * pair + 1 < lists ? merged_at(a, kChunk, a + kChunk, kChunk, at) : a[at];
      }
      // Keep the windows: the cursors advance by the keys taken from them.
      Key* free = level == windows ? other + merged * kChunk : level;
      level = other;
      other = free;
    }
    return level;
  }

  // Advance the cursor of each run past its keys up to `last`, which are the first keys of its window.
  __device__ __forceinline__ void advance_cursors(Key last) const {
    for (int run = warp; run < runs; run += kWarps) {
      int taken = 0;
      for (int at = lane; at < kChunk; at += 32) {
        taken += __popc(__ballot_sync(kFullWarp, windows[run * kChunk + at] <= last));
      }
      if (lane == 0) s.cursor[run] += taken;
    }
  }

  __device__ __forceinline__ Candidate<A> place(Key key, int count) const {
    Candidate<A> mine;
    mine.placed = nothing;
    if (thread < count) {
      const uint32_t index = static_cast<uint32_t>(key);
      mine.anchor = index / classes;
      mine.box_class = static_cast<int32_t>(index - mine.anchor * classes);
      mine.confidence = Keys<A>::confidence(key);
      with_layout<A>(p.source, [&](auto layout) {
        mine.box = candidate_corners<decltype(layout)>(p.source, image, mine.anchor, promoted);
      });
      mine.alive = is_finite(mine.box);
      mine.placed = proper_or_void(moved(mine.box, mul_rn(A(mine.box_class), offset)));
    }
    if (thread < kChunk) {
      chunk.box[thread] = mine.placed;
      chunk.box_class[thread] = mine.box_class;
      const unsigned lanes = __ballot_sync(kFullWarp, mine.alive);
      if (lane == 0) s.alive[warp] = lanes;
    }
    __syncthreads();
    return mine;
  }

  // Test whether a kept box suppresses the candidates. kShares threads share the list for each candidate.
  __device__ __forceinline__ void test_against_kept(int kept) const {
    const int mine = thread % kChunk, share = thread / kChunk;
    const CornerBox<A> my_box = chunk.box[mine];
    const int32_t my_class = chunk.box_class[mine];
    const bool can_meet = my_box.x1 < my_box.x2;  // a void box intersects none
    bool open = can_meet;
    for (int first = share * kBatch; first < kept; first += kShares * kBatch) {
      if (!__any_sync(kFullWarp, open)) break;
      if (open) {
        open = !suppressors<A, kBatch>(s.box + first, s.box_class + first, my_box, my_class, same_class, threshold);
      }
    }
    const unsigned lanes = __ballot_sync(kFullWarp, open || !can_meet);
    if (lane == 0) atomicAnd(&s.alive[mine / 32], lanes);
    __syncthreads();
  }

  // Compact the survivors in order: `me` is this thread's position. Return their number.
  __device__ __forceinline__ int gather_survivors(Candidate<A>& mine, int& me) const {
    int survivors = 0;
    me = 0;
    if (thread < kChunk) mine.alive = (s.alive[warp] >> lane) & 1;
    for (int word = 0; word < kWords; ++word) {
      const uint32_t lanes = s.alive[word];
      me += word < warp ? __popc(lanes) : word == warp ? __popc(lanes & ((1u << lane) - 1)) : 0;
      survivors += __popc(lanes);
    }
    if (thread < kChunk) {
      if (mine.alive) {
        chunk.box[me] = mine.placed;
        chunk.box_class[me] = mine.box_class;
      }
      if (thread >= survivors) chunk.box[thread] = nothing;
    }
    __syncthreads();
    return survivors;
  }

  // Compute which earlier survivors would suppress each one, in tasks of 32 x 32 pairs below the diagonal.
  __device__ __forceinline__ void test_survivors(int words) const {
    const int tasks = words * (words + 1) / 2;
    for (int task = warp; task < tasks; task += kWarps) {
      int block = static_cast<int>((sqrtf(8.f * task + 1.f) - 1.f) * 0.5f);
      while (block * (block + 1) / 2 > task) --block;
      while ((block + 1) * (block + 2) / 2 <= task) ++block;
      const int word = task - block * (block + 1) / 2;
      const int i = block * 32 + lane;
      uint32_t bits = suppressors<A, 32>(chunk.box + word * 32, chunk.box_class + word * 32, chunk.box[i],
                                         chunk.box_class[i], same_class, threshold);
      if (word == block) bits &= (1u << lane) - 1;
      chunk.earlier[word][i] = bits;
    }
    __syncthreads();
  }

  // Decide greedily over the bit matrix, 32 survivors at a time, with one warp. Lane i holds the kept bits of word i.
  __device__ __forceinline__ void decide(int kept, int survivors, int words) const {
    static_assert(kWords <= 32);
    int total = kept, my_before = 0;
    uint32_t my_keeps = 0;
    for (int block = 0; block < words; ++block) {
      const int i = block * 32 + lane;
      uint32_t hit = 0;
#pragma unroll 4
      for (int word = 0; word < block; ++word) hit |= chunk.earlier[word][i] & __shfl_sync(kFullWarp, my_keeps, word);
      const bool open = i < survivors && !hit;
      const uint32_t mine = open ? chunk.earlier[block][i] : 0;
      uint32_t undecided = __ballot_sync(kFullWarp, open), keeps = 0;
      while (undecided) {
        const bool waits = (undecided >> lane) & 1;
        const uint32_t found = __ballot_sync(kFullWarp, waits && !(mine & undecided));
        keeps |= found;
        undecided &= ~found;
        undecided &= ~__ballot_sync(kFullWarp, (mine & keeps) != 0);
      }
      if (lane == block) {
        my_keeps = keeps;
        my_before = total;
      }
      total += __popc(keeps);
    }
    if (lane < words) {
      s.keeps[lane] = my_keeps;
      s.before[lane] = my_before;
    }
    if (lane == 0) s.total = total;
  }

  __device__ __forceinline__ void keep(const Candidate<A>& mine, int me, int limit) const {
    if (thread >= kChunk || !mine.alive || !((s.keeps[me / 32] >> (me & 31)) & 1)) return;
    const int rank = s.before[me / 32] + __popc(s.keeps[me / 32] & ((1u << (me & 31)) - 1));
    if (rank >= limit) return;
    s.box[rank] = mine.placed;
    s.box_class[rank] = mine.box_class;
    write_row<A>(p, image, rank, mine.anchor, mine.box, mine.confidence, mine.box_class);
  }
};

template <typename A>
__global__ void __launch_bounds__(kThreads) suppress_kernel(const __grid_constant__ NmsKernel p) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  auto& list = *reinterpret_cast<Kept<A>*>(dynamic);
  auto& chunk = *reinterpret_cast<Chunk<A>*>(dynamic + (sizeof(Kept<A>) + 15) / 16 * 16);
  const Suppression<A> step(p, list, chunk, blockIdx.x);
  const int limit = static_cast<int>(p.kept);
  int64_t left = p.candidates(step.image);
  step.start();
  int kept = 0;
  while (left > 0 && kept < limit) {
    __syncthreads();
    const int count = left < step.kChunk ? static_cast<int>(left) : step.kChunk;
    const auto key = step.next_keys(count);
    left -= count;
    Candidate<A> mine = step.place(key, count);
    if (kept > 0) step.test_against_kept(kept);
    int me;
    const int survivors = step.gather_survivors(mine, me);
    const int words = (survivors + 31) / 32;
    step.test_survivors(words);
    if (step.warp == 0) step.decide(kept, survivors, words);
    __syncthreads();
    step.keep(mine, me, limit);
    kept = list.total < limit ? list.total : limit;
  }
  __syncthreads();
  write_rest<A>(p, step.image, kept, step.promoted);
}

template <typename A>
cudaError_t launch(const NmsKernel& kernel, const NmsPlan& plan, cudaStream_t stream) {
  const int64_t bytes = suppress_shared_bytes(sizeof(A) == 8, plan.merged_runs);
  static_assert(sizeof(Chunk<A>) == Keys<A>::kChunk * (sizeof(CornerBox<A>) + 4 + Keys<A>::kChunk / 8));
  static_assert((sizeof(Kept<A>) + 15) / 16 * 16 <= kSharedDetections * (sizeof(CornerBox<A>) + 4) + 1024);
  const cudaError_t error =
      cudaFuncSetAttribute(suppress_kernel<A>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  suppress_kernel<A><<<static_cast<unsigned>(plan.images), kThreads, static_cast<size_t>(bytes), stream>>>(kernel);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_suppress(const NmsKernel& kernel, const NmsPlan& plan, cudaStream_t stream) {
  return kernel.source.dtype == DType::kFloat64 ? launch<double>(kernel, plan, stream)
                                                : launch<float>(kernel, plan, stream);
}

}  // namespace torch_fastdet::core
