// Select the (anchor, class) pairs that pass, as keys in each image's buffer. An image whose candidates do not fit is
// cut first: a radix search over its keys finds the best max_candidates or a few more. Each of its passes reads the
// source again, so that the capacity bounds the memory.
#pragma once

#include "core/nms/nms_device.cuh"

namespace torch_fastdet::core {

enum class SelectMode : int32_t { kAppend, kHistogram, kGather };

struct SelectKernel {
  NmsKernel nms;
  ClassFilter filter;
  SelectMode mode;
  int64_t blocks_per_image;
  bool anchors_adjacent;  // neighbouring anchors are adjacent in memory
  int32_t level_index;
  CutLevel level;
};

constexpr int kSelectThreads = 256;
constexpr int kSelectWarps = kSelectThreads / 32;

template <typename Layout, int kItems>
struct BlockRows {  // anchors of a block that passed objectness
  static constexpr int kSize = kSelectThreads * kItems;
  Scores<typename Layout::Stored> scores[kSize];
  typename Layout::A objectness[kSize];
  uint16_t anchor[kSize];  // relative to the block's first
  uint8_t broken[kSize];
  int32_t warp_counts[kSelectWarps];
};

// A block visits its anchors [first, first + kItems * kSelectThreads), kItems per thread, and passes candidates to a
// sink one warp at a time. Whole warps call sink.add(valid, confidence, index); sink.full() ends a warp's visit. Every
// step is inlined, which keeps the members in registers.
template <typename Layout, int kItems>
struct Visit {
  using A = typename Layout::A;
  using ScoresOf = Scores<typename Layout::Stored>;

  const SelectKernel& p;
  const CandidateSource& source;
  const NmsOptions& options;
  BlockRows<Layout, kItems>& rows;
  const int64_t image, first;
  const bool promoted;
  const int lane, warp, classes;
  const A threshold;
  const bool any_nan_drops;

  // These are the thread's anchors, and the lanes of its warp whose anchors passed objectness.
  ScoresOf scores[kItems];
  A objectness[kItems];
  unsigned lanes[kItems];
  int count = 0;  // anchors of the block that passed
  int rank = 0;   // of these, the anchors of earlier warps

  __device__ __forceinline__ Visit(const SelectKernel& p, int64_t image, int64_t first, bool promoted,
                                   BlockRows<Layout, kItems>& rows)
      : p(p),
        source(p.nms.source),
        options(p.nms.options),
        rows(rows),
        image(image),
        first(first),
        promoted(promoted),
        lane(threadIdx.x & 31),
        warp(threadIdx.x >> 5),
        classes(static_cast<int>(source.classes)),
        threshold(confidence_threshold<A>(options, promoted)),
        any_nan_drops(!options.multi_label || options.nan_class_drops_anchor) {}

  __device__ __forceinline__ uint32_t index(int64_t anchor, int c) const {
    return static_cast<uint32_t>(anchor) * static_cast<uint32_t>(classes) + static_cast<uint32_t>(c);
  }

  __device__ __forceinline__ bool passes(A confidence, int c) const {
    return confidence > threshold && confidence < static_cast<A>(HUGE_VAL) && is_allowed(p.filter, c);
  }

  // Labels follow the anchors. Each label is a candidate of confidence 1.
  template <typename Sink>
  __device__ __forceinline__ void visit_labels(Sink& sink) const {
    for (int item = 0; item < kItems; ++item) {
      const int64_t n = first + item * kSelectThreads + threadIdx.x;
      bool valid = false;
      int c = 0;
      const int64_t label = n - source.anchors;
      if (label >= 0 && label < source.label_count && label_exists(source, label, image)) {
        c = static_cast<int>(source.labels[label * 6 + 1]);
        valid = passes(A(1), c);
      }
      sink.add(valid, A(1), index(n, c));
    }
  }

  // Find the anchors whose objectness exceeds `least` and that can pass.
  __device__ __forceinline__ void find_anchors(A least) {
    int in_warp = 0;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int64_t n = first + item * kSelectThreads + threadIdx.x;
      bool present = false;
      scores[item] = ScoresOf{};
      objectness[item] = 0;
      if (n < source.anchors) {
        const auto anchor = Layout::anchor(source, image, n);
        present = Layout::objectness(source, anchor, options, objectness[item]) && objectness[item] > least;
        scores[item] = Layout::scores(source, anchor);
      }
      lanes[item] = __ballot_sync(kFullWarp, present);
      in_warp += __popc(lanes[item]);
    }
    if (lane == 0) rows.warp_counts[warp] = in_warp;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kSelectWarps; ++w) {
      rank += w < warp ? rows.warp_counts[w] : 0;
      count += rows.warp_counts[w];
    }
  }

  // Each lane goes through the classes of its own anchors, so that a warp reads neighbours together.
  template <typename Sink>
  __device__ __forceinline__ void visit_own_anchors(Sink& sink) const {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (lanes[item]) visit_own_anchor(item, sink);
    }
  }

  template <typename Sink>
  __device__ __forceinline__ void visit_own_anchor(int item, Sink& sink) const {
    constexpr int kBatch = 8;
    const int64_t n = first + item * kSelectThreads + threadIdx.x;
    // With members instead of local copies the compiler branches on each load of a batch, which serializes the loads.
    const int classes = this->classes;
    const ScoresOf mine = scores[item];
    const bool present = (lanes[item] >> lane) & 1;
    bool broken = false;
    if (options.multi_label && any_nan_drops && present) {
      for (int c = 0; c < classes; ++c) {
        const A raw = mine.at(c);
        broken |= raw != raw;
      }
    }
    A best = -1;
    int best_class = 0;
    for (int start = 0; start < classes && !sink.full(); start += kBatch) {
      A raw[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) raw[k] = present && start + k < classes ? mine.at(start + k) : A(0);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int c = start + k;
        if (c >= classes) break;
        A score = 0;
        const bool possible = present && Layout::score(raw[k], options, score);
        const A confidence = core::confidence<Layout>(source, objectness[item], score, promoted);
        sink.see(possible, score);
        if (options.multi_label) {
          sink.add(possible && !broken && passes(confidence, c), confidence, index(n, c));
        } else if (possible) {
          broken |= confidence != confidence;
          if (confidence > best) {
            best = confidence;
            best_class = c;
          }
        }
      }
    }
    if (!options.multi_label) sink.add(present && !broken && passes(best, best_class), best, index(n, best_class));
  }

  // Compact the anchors that passed into shared memory, and mark those with NaN class scores.
  __device__ __forceinline__ void share_rows() {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if ((lanes[item] >> lane) & 1) {
        const int at = rank + __popc(lanes[item] & ((1u << lane) - 1));
        rows.scores[at] = scores[item];
        rows.objectness[at] = objectness[item];
        rows.anchor[at] = static_cast<uint16_t>(item * kSelectThreads + threadIdx.x);
      }
      rank += __popc(lanes[item]);
    }
    __syncthreads();
    if (!any_nan_drops || !options.multi_label) return;
    for (int row = warp; row < count; row += kSelectWarps) {
      const ScoresOf mine = rows.scores[row];
      bool broken = false;
      for (int c = lane; c < classes; c += 32) {
        const A raw = mine.at(c);
        broken |= raw != raw;
      }
      broken = __any_sync(kFullWarp, broken);
      if (lane == 0) rows.broken[row] = broken;
    }
    __syncthreads();
  }

  static constexpr int kRows = 4;  // rows that a warp reads together

  // Distribute the rows over the warps. (With members as bounds the compiler puts the arrays in local memory.)
  template <typename Sink>
  __device__ __forceinline__ void visit_shared_rows(Sink& sink) const {
    const int count = this->count, classes = this->classes, lane = this->lane, warp = this->warp;
    const bool multi_label = options.multi_label;
    for (int base = warp * kRows; base < count && !sink.full(); base += kSelectWarps * kRows) {
      // If an anchor has only one class, these are the lane's best of each row.
      A best[kRows];
      int best_class[kRows];
      bool broken[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        best[r] = -1;
        best_class[r] = 0;
        broken[r] = multi_label && any_nan_drops && base + r < count && rows.broken[base + r];
      }
      constexpr int kBatch = 3;
      for (int start = 0; start < classes; start += 32 * kBatch) {
        A raw[kRows][kBatch];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const ScoresOf mine = base + r < count ? rows.scores[base + r] : ScoresOf{};
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            const int c = start + 32 * k + lane;
            raw[r][k] = base + r < count && c < classes ? mine.at(c) : A(0);
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (base + r >= count) break;
          const A row_objectness = rows.objectness[base + r];
          const uint32_t row_index = index(first + rows.anchor[base + r], 0);
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            if (start + 32 * k >= classes) break;
            const int c = start + 32 * k + lane;
            A score = 0;
            const bool possible = c < classes && Layout::score(raw[r][k], options, score);
            const A confidence = core::confidence<Layout>(source, row_objectness, score, promoted);
            sink.see(possible, score);
            if (multi_label) {
              sink.add(possible && !broken[r] && passes(confidence, c), confidence, row_index + c);
            } else if (possible) {
              broken[r] |= confidence != confidence;
              if (confidence > best[r]) {
                best[r] = confidence;
                best_class[r] = c;
              }
            }
          }
        }
      }
      if (multi_label) continue;
      // Lane r takes row r's best over all lanes: the highest confidence, then the lowest class.
      A mine = -1;
      int my_class = 0;
      bool valid = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int step = 16; step; step >>= 1) {
          const A other = __shfl_xor_sync(kFullWarp, best[r], step);
          const int other_class = __shfl_xor_sync(kFullWarp, best_class[r], step);
          if (other > best[r] || (other == best[r] && other_class < best_class[r])) {
            best[r] = other;
            best_class[r] = other_class;
          }
        }
        broken[r] = __any_sync(kFullWarp, broken[r]);
        if (lane == r) {
          mine = best[r];
          my_class = best_class[r];
          valid = base + r < count && !broken[r];
        }
      }
      const int64_t my_anchor = first + (valid ? rows.anchor[base + lane] : 0);
      sink.add(valid && passes(mine, my_class), mine, index(my_anchor, my_class));
    }
  }
};

// Pass a block's candidates to `sink`. Skip anchors whose objectness does not exceed `least`.
template <typename Layout, int kItems, typename Sink>
__device__ __forceinline__ void visit_anchors(const SelectKernel& p, int64_t image, int64_t first, bool promoted,
                                              typename Layout::A least, BlockRows<Layout, kItems>& rows, Sink& sink) {
  Visit<Layout, kItems> visit(p, image, first, promoted, rows);
  if (p.nms.source.label_count && first + kItems * kSelectThreads > p.nms.source.anchors) visit.visit_labels(sink);
  visit.find_anchors(least);
  if (visit.count == 0) return;
  if (p.anchors_adjacent && visit.count >= kItems * (kSelectThreads / 4)) {
    visit.visit_own_anchors(sink);
    return;
  }
  visit.share_rows();
  visit.visit_shared_rows(sink);
}

// Collect a warp's keys and write them 32 at a time.
template <typename A>
class WarpAppender {
 public:
  using Key = key_of<A>;
  // Keys with (key >> shift) > last are skipped.
  __device__ WarpAppender(Key* staged, Key* keys, uint32_t* count, int64_t capacity, bool cut, int shift, Key last)
      : staged_(staged), keys_(keys), count_(count), capacity_(capacity), cut_(cut), shift_(shift), last_(last) {}

  __device__ __forceinline__ void add(bool valid, A confidence, uint32_t index) {
    const Key key = Keys<A>::make(confidence, index);
    if (cut_) valid = valid && (key >> shift_) <= last_;
    const unsigned lanes = __ballot_sync(kFullWarp, valid);
    if (!lanes) return;
    const int lane = threadIdx.x & 31;
    if (valid) staged_[size_ + __popc(lanes & ((1u << lane) - 1))] = key;
    __syncwarp();
    size_ += __popc(lanes);
    if (size_ >= 32) {
      write(32);
      size_ -= 32;
      const Key rest = lane < size_ ? staged_[32 + lane] : Key(0);
      __syncwarp();
      if (lane < size_) staged_[lane] = rest;
      __syncwarp();
    }
  }
  __device__ __forceinline__ void see(bool, A) {}
  // Return whether the buffer is full: the image will then be cut and its candidates gathered again.
  __device__ __forceinline__ bool full() const { return full_; }
  __device__ __forceinline__ void flush() {
    if (size_) write(size_);
  }

 private:
  __device__ __forceinline__ void write(int count) {
    const int lane = threadIdx.x & 31;
    uint32_t base = 0;
    if (lane == 0) base = atomicAdd(count_, static_cast<uint32_t>(count));
    base = __shfl_sync(kFullWarp, base, 0);
    const int64_t position = static_cast<int64_t>(base) + lane;
    if (lane < count && position < capacity_) keys_[position] = staged_[lane];
    full_ = static_cast<int64_t>(base) + count > capacity_;
  }

  Key* staged_;
  Key* keys_;
  uint32_t* count_;
  int64_t capacity_;
  bool cut_;
  int shift_;
  Key last_;
  int size_ = 0;
  bool full_ = false;
};

// Count the digits of one level, for keys with the prefix of the levels above.
template <typename A>
struct DigitCounter {
  using Key = key_of<A>;
  uint32_t* histogram;
  Key prefix;
  int parent_shift, shift;
  uint32_t mask;
  bool all;                // the first level
  bool above_one = false;  // a class score above 1 was seen

  __device__ __forceinline__ void add(bool valid, A confidence, uint32_t index) {
    if (!valid) return;
    const Key key = Keys<A>::make(confidence, index);
    if (all || (key >> parent_shift) == prefix) atomicAdd(histogram + (static_cast<uint32_t>(key >> shift) & mask), 1u);
  }
  __device__ __forceinline__ void see(bool possible, A score) { above_one |= possible && score > A(1); }
  __device__ __forceinline__ bool full() const { return false; }
};

// Find the cut's digit in the histogram, in the image's last block, and clear it for the next level.
template <typename A>
__device__ void decide_level(const SelectKernel& p, int64_t image) {
  using Key = key_of<A>;
  uint32_t* histogram = p.nms.at<uint32_t>(p.nms.histogram) + image * kHistogramBins;
  auto& state = p.nms.at<CutState<Key>>(p.nms.cut_states)[image];
  __shared__ uint32_t sums[kSelectThreads];
  constexpr int kEach = kHistogramBins / kSelectThreads;
  const int thread = threadIdx.x;
  uint32_t counts[kEach], total = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    counts[i] = __ldcg(histogram + thread * kEach + i);
    total += counts[i];
    histogram[thread * kEach + i] = 0;
  }
  sums[thread] = total;
  for (int step = 1; step < kSelectThreads; step <<= 1) {
    __syncthreads();
    const uint32_t below = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += below;
  }
  const uint32_t before_me = sums[thread] - total;
  const uint64_t wanted = static_cast<uint64_t>(p.nms.options.max_candidates);
  const uint32_t better = state.better;
  const Key prefix = state.prefix;
  __syncthreads();
  uint64_t sum = static_cast<uint64_t>(better) + before_me;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const uint64_t up_to = sum + counts[i];
    if (sum < wanted && up_to >= wanted) {
      state.prefix = (prefix << (p.level.parent_shift - p.level.shift)) | Key(thread * kEach + i);
      state.better = static_cast<uint32_t>(sum);
      state.shift = static_cast<uint16_t>(p.level.shift);
      state.decided = up_to <= static_cast<uint64_t>(p.nms.capacity);
    }
    sum = up_to;
  }
}

// Return the confidence that an anchor needs to affect the cut. It is at most the objectness if no score exceeds 1.
template <typename A>
__device__ __forceinline__ A least_objectness(const SelectKernel& p, const CutState<key_of<A>>& state) {
  using Key = key_of<A>;
  if (!p.nms.source.has_objectness || state.above_one || !state.shift) return -1;
  const int low = state.shift;  // includes all keys with the prefix
  const Key last = (state.prefix << low) | ((Key(1) << low) - 1);
  const A lowest = Keys<A>::confidence(last);
  return lowest > A(1e-30) ? lowest - lowest * A(1e-6) : A(-1);
}

// Add a block's histogram in shared memory to its image's. The last block decides the level.
template <typename A>
__device__ __forceinline__ void finish_histogram(const SelectKernel& p, int64_t image, const uint32_t* histogram) {
  uint32_t* global = p.nms.at<uint32_t>(p.nms.histogram) + image * kHistogramBins;
  for (int i = threadIdx.x; i < kHistogramBins; i += kSelectThreads) {
    if (histogram[i]) atomicAdd(global + i, histogram[i]);
  }
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* ticket = p.nms.at<uint32_t>(p.nms.tickets) + p.level_index * p.nms.source.images + image;
    last = atomicAdd(ticket, 1u) == p.blocks_per_image - 1;
  }
  __syncthreads();
  if (last) {
    __threadfence();
    decide_level<A>(p, image);
  }
}

template <typename Layout, int kItems>
__global__ void __launch_bounds__(kSelectThreads, sizeof(typename Layout::A) == 8 ? 2
                                                  : kItems == 1                   ? 4
                                                                                  : 3)
    select_kernel(const __grid_constant__ SelectKernel p) {
  using A = typename Layout::A;
  using Key = key_of<A>;
  constexpr size_t kStagedBytes = kSelectWarps * 64 * sizeof(Key);
  __shared__ BlockRows<Layout, kItems> rows;
  __shared__ alignas(16) unsigned char shared[kHistogramBins * 4 > kStagedBytes ? kHistogramBins * 4 : kStagedBytes];
  const int64_t image = blockIdx.x / p.blocks_per_image;
  const int64_t block = blockIdx.x - image * p.blocks_per_image;
  const int64_t first = block * kSelectThreads * kItems;
  const int warp = threadIdx.x >> 5;
  const bool promoted = p.nms.is_promoted(image);
  uint32_t* found = p.nms.at<uint32_t>(p.nms.found) + image;
  Key* keys = p.nms.at<Key>(p.nms.keys) + image * p.nms.capacity;
  Key* staged = reinterpret_cast<Key*>(shared) + warp * 64;

  if (p.mode == SelectMode::kAppend) {
    // Let one thread read the count: other blocks are adding to it, and the whole block must take the same branch.
    if (p.nms.cuts) {
      __shared__ bool overflowed;
      if (threadIdx.x == 0) overflowed = __ldcg(found) > p.nms.capacity;
      __syncthreads();
      if (overflowed) return;
    }
    WarpAppender<A> appender(staged, keys, found, p.nms.capacity, false, 0, Key(0));
    visit_anchors(p, image, first, promoted, A(-1), rows, appender);
    appender.flush();
    return;
  }

  if (__ldcg(found) <= p.nms.capacity) return;
  const CutState<Key> state = p.nms.at<CutState<Key>>(p.nms.cut_states)[image];
  const A least = least_objectness<A>(p, state);
  if (p.mode == SelectMode::kGather) {
    WarpAppender<A> appender(staged, keys, p.nms.at<uint32_t>(p.nms.gathered) + image, p.nms.capacity, true,
                             state.shift, state.prefix);
    visit_anchors(p, image, first, promoted, least, rows, appender);
    appender.flush();
    return;
  }

  if (state.decided) return;
  auto* histogram = reinterpret_cast<uint32_t*>(shared);
  for (int i = threadIdx.x; i < kHistogramBins; i += kSelectThreads) histogram[i] = 0;
  __syncthreads();
  DigitCounter<A> counter{
      histogram, state.prefix, p.level.parent_shift, p.level.shift, (1u << p.level.width) - 1, p.level_index == 0};
  visit_anchors(p, image, first, promoted, least, rows, counter);
  if (__syncthreads_or(counter.above_one) && threadIdx.x == 0) {
    atomicOr(&p.nms.at<CutState<Key>>(p.nms.cut_states)[image].above_one, 1u);
  }
  finish_histogram<A>(p, image, histogram);
}

template <typename Layout, int kItems>
cudaError_t launch_select_items(SelectKernel& p, const NmsPlan& plan, cudaStream_t stream) {
  const int64_t rows = p.nms.source.anchors + p.nms.source.label_count;
  p.blocks_per_image = ceil_div(rows, kSelectThreads * kItems);
  const unsigned blocks = static_cast<unsigned>(p.blocks_per_image * plan.images);
  const auto launch = [&] { select_kernel<Layout, kItems><<<blocks, kSelectThreads, 0, stream>>>(p); };
  p.mode = SelectMode::kAppend;
  launch();
  if (plan.cuts) {
    p.mode = SelectMode::kHistogram;
    for (p.level_index = 0; p.level_index < plan.levels; ++p.level_index) {
      p.level = plan.level[p.level_index];
      launch();
    }
    p.mode = SelectMode::kGather;
    launch();
  }
  return cudaGetLastError();
}

template <typename Layout>
cudaError_t launch_select_layout(SelectKernel& p, const NmsPlan& plan, cudaStream_t stream) {
  // Let each thread load four anchors at once if objectness leaves few of them and lanes share no anchor.
  if constexpr (Layout::kMayHaveObjectness) {
    const int64_t rows = p.nms.source.anchors + p.nms.source.label_count;
    const bool few = p.nms.source.has_objectness && (!p.anchors_adjacent || p.nms.options.confidence >= 0.05);
    if (few && rows * plan.images >= (int64_t{1} << 17)) return launch_select_items<Layout, 4>(p, plan, stream);
  }
  return launch_select_items<Layout, 1>(p, plan, stream);
}

// Each layout has its own translation unit, so that they compile in parallel.
cudaError_t launch_select_prediction(SelectKernel& kernel, const NmsPlan& plan, cudaStream_t stream);
cudaError_t launch_select_anchor_heads(SelectKernel& kernel, const NmsPlan& plan, cudaStream_t stream);
cudaError_t launch_select_anchor_free_heads(SelectKernel& kernel, const NmsPlan& plan, cudaStream_t stream);

}  // namespace torch_fastdet::core
