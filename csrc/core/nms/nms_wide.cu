// Compute exact greedy suppression for long kept lists with the whole GPU, kWideChunk candidates at a time. One launch
// tests a chunk against all kept boxes and against itself (a bit matrix of fixed size); the next launch decides it in
// order. Rotated boxes use these kernels too. RotatedRule::kFast tests a chunk against all candidates before it.
#include "core/nms/nms_device.cuh"
#include "core/nms/nms_rows.cuh"
#include "core/nms/rotated_math.h"

namespace torch_fastdet::core {

namespace {

constexpr int kThreads = 256, kDecideThreads = 1024;
constexpr int kChunk = static_cast<int>(kWideChunk), kWords = kChunk / 32, kGroups = kChunk / kThreads;
constexpr int kSegment = 512;

template <typename A>
__device__ __forceinline__ const key_of<A>* sorted_keys(const NmsKernel& p, int64_t image) {
  return p.at<key_of<A>>(p.merges & 1 ? p.other_keys : p.keys) + image * p.capacity;
}

template <typename T>
struct Upright {
  using A = T;
  using Box = CornerBox<A>;
  static __device__ __forceinline__ Box nothing() { return proper_or_void(Box{}); }
  static __device__ __forceinline__ Box place(const NmsKernel& p, int64_t image, uint32_t n, uint32_t, A offset,
                                              bool& finite) {
    Box box{};
    with_layout<A>(p.source, [&](auto layout) {
      box = candidate_corners<decltype(layout)>(p.source, image, n, p.is_promoted(image));
    });
    finite = is_finite(box);
    return proper_or_void(moved(box, offset));
  }
  static __device__ __forceinline__ uint32_t suppressed_by(const Box* boxes, const int32_t* classes, const Box& mine,
                                                           int32_t my_class, bool same_class, A threshold) {
    return suppressors<A, 32>(boxes, classes, mine, my_class, same_class, threshold);
  }
  template <typename Layout>
  static __device__ __forceinline__ void write(const NmsKernel& p, int64_t image, int64_t row, uint32_t n, A confidence,
                                               int32_t box_class) {
    const Box box = candidate_corners<Layout>(p.source, image, n, p.is_promoted(image));
    write_row<A>(p, image, row, n, box, confidence, box_class);
  }
};

template <typename T>
struct Rotated {
  using A = T;
  using Box = RotatedBox<A>;
  static __device__ __forceinline__ Box nothing() { return no_rotated_box<A>(); }
  static __device__ __forceinline__ Box place(const NmsKernel& p, int64_t image, uint32_t n, uint32_t box_class,
                                              A offset, bool& finite) {
    RotatedCandidate<A> candidate{};
    with_layout<A>(p.source, [&](auto layout) {
      using Layout = decltype(layout);
      if constexpr (Layout::kMayBeRotated) {
        candidate = Layout::rotated(p.source, Layout::anchor(p.source, image, n), box_class);
      }
    });
    finite = is_finite(candidate);
    return finite ? place_rotated(candidate, offset, A(p.options.reach_scale)) : nothing();
  }
  // Test as suppressors() in nms_device.cuh does: cheaply for all boxes, then by the formula for the few that are near.
  static __device__ __forceinline__ uint32_t suppressed_by(const Box* boxes, const int32_t* classes, const Box& mine,
                                                           int32_t my_class, bool same_class, A threshold) {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 32; ++j) bits |= rotated_boxes_near(boxes[j], mine) ? 1u << j : 0u;
    for (uint32_t rest = bits; rest; rest &= rest - 1) {
      const int j = __ffs(rest) - 1;
      if ((same_class && classes[j] != my_class) || !(probiou(boxes[j], mine) > threshold)) bits &= ~(1u << j);
    }
    return bits;
  }
  template <typename Layout>
  static __device__ __forceinline__ void write(const NmsKernel& p, int64_t image, int64_t row, uint32_t n, A confidence,
                                               int32_t box_class) {
    if constexpr (Layout::kMayBeRotated) {
      const auto candidate = Layout::rotated(p.source, Layout::anchor(p.source, image, n), box_class);
      write_row<A>(p, image, row, n, candidate.box, confidence, box_class);
    }
  }
};

// Place the boxes of all candidates for comparison, in order of confidence.
template <typename Kind>
__global__ void __launch_bounds__(kThreads) place_kernel(const __grid_constant__ NmsKernel p) {
  using A = typename Kind::A;
  const int64_t image = blockIdx.y, i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.candidates(image)) return;
  const auto key = sorted_keys<A>(p, image)[i];
  const uint32_t index = static_cast<uint32_t>(key), classes = static_cast<uint32_t>(p.source.classes);
  const uint32_t n = index / classes, box_class = index - n * classes;
  const A offset = p.options.class_rule == ClassRule::kOffset ? A(p.options.max_wh) : A(0);
  bool finite = false;
  p.at<typename Kind::Box>(p.boxes)[image * p.capacity + i] =
      Kind::place(p, image, n, box_class, mul_rn(A(box_class), offset), finite);
  // A class that no other box has marks a box that is not finite.
  p.at<int32_t>(p.classes)[image * p.capacity + i] = finite ? static_cast<int32_t>(box_class) : -1;
}

template <typename Kind>
__global__ void __launch_bounds__(kThreads) test_kernel(const __grid_constant__ NmsKernel p, int64_t first) {
  using A = typename Kind::A;
  using Box = typename Kind::Box;
  __shared__ Box others[kSegment];
  __shared__ int32_t other_classes[kSegment];
  const int64_t image = blockIdx.y;
  const int64_t total = p.candidates(image);
  const int64_t kept = p.at<uint32_t>(p.kept_count)[image];
  if (first >= total || kept >= p.kept) return;
  const int count = total - first < kChunk ? static_cast<int>(total - first) : kChunk;
  const bool fast = p.options.rotated == RotatedRule::kFast;
  const int64_t before = fast ? first : kept;  // boxes that this chunk is tested against, besides itself
  const bool same_class = p.options.class_rule == ClassRule::kExact;
  const A threshold = A(p.options.iou);
  const int thread = threadIdx.x, lane = thread & 31;
  const int group = blockIdx.x % kGroups;
  const int i = group * kThreads + thread;
  if (group * kThreads >= count) return;
  const Box* boxes = p.at<Box>(p.boxes) + image * p.capacity + first;
  const int32_t* classes = p.at<int32_t>(p.classes) + image * p.capacity + first;
  const Box* kept_boxes = fast ? boxes - first : p.at<Box>(p.kept_boxes) + image * p.kept;
  const int32_t* kept_classes = fast ? classes - first : p.at<int32_t>(p.kept_classes) + image * p.kept;
  uint32_t* masks = p.at<uint32_t>(p.masks) + image * kWords * kChunk;
  const Box nothing = Kind::nothing();
  const bool inside = i < count;
  const Box mine = inside ? boxes[i] : nothing;
  const int32_t my_class = inside ? classes[i] : -1;
  const int kept_segments = static_cast<int>(ceil_div(before, kSegment));
  const int own_segments = (group * kThreads + kThreads + kSegment - 1) / kSegment;
  bool suppressed = false, overlapped = false;
  for (int segment = blockIdx.x / kGroups; segment < kept_segments + own_segments; segment += gridDim.x / kGroups) {
    const bool own = segment >= kept_segments;
    const int64_t start = static_cast<int64_t>(own ? segment - kept_segments : segment) * kSegment;
    const int64_t end = own ? count : before;
    const int size = end - start < kSegment ? static_cast<int>(end - start) : kSegment;
    __syncthreads();
    for (int k = thread; k < kSegment; k += kThreads) {
      others[k] = k >= size ? nothing : own ? boxes[start + k] : kept_boxes[start + k];
      other_classes[k] = k >= size ? -1 : own ? classes[start + k] : kept_classes[start + k];
    }
    __syncthreads();
    if (!own) {
      for (int k = 0; k < size; k += 32) {
        if (__all_sync(kFullWarp, suppressed)) break;
        suppressed |= Kind::suppressed_by(others + k, other_classes + k, mine, my_class, same_class, threshold) != 0;
      }
      continue;
    }
    const int first_word = static_cast<int>(start / 32), last_word = i / 32;  // the same for a whole warp
    for (int word = 0; word * 32 < size && first_word + word <= last_word; ++word) {
      uint32_t bits =
          Kind::suppressed_by(others + word * 32, other_classes + word * 32, mine, my_class, same_class, threshold);
      if (first_word + word == last_word) bits &= (1u << lane) - 1;
      if (!fast) masks[(first_word + word) * kChunk + i] = bits;
      overlapped |= bits != 0;
    }
  }
  const unsigned suppressed_lanes = __ballot_sync(kFullWarp, suppressed);
  const unsigned overlapped_lanes = __ballot_sync(kFullWarp, overlapped);
  if (lane == 0) {
    const int64_t word = image * kWords + i / 32;
    if (suppressed_lanes) atomicOr(p.at<uint32_t>(p.suppressed) + word, suppressed_lanes);
    if (overlapped_lanes) atomicOr(p.at<uint32_t>(p.overlapped) + word, overlapped_lanes);
  }
}

// Count the detections before each word of `keeps` by one warp's scan over pairs of words. Lane 31 returns the sum.
__device__ __forceinline__ int count_before(const uint32_t (&keeps)[kWords], int32_t (&before)[kWords], int lane) {
  static_assert(kWords == 64);
  const int a = __popc(keeps[2 * lane]), both = a + __popc(keeps[2 * lane + 1]);
  int sum = both;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int below = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += below;
  }
  before[2 * lane] = sum - both;
  before[2 * lane + 1] = sum - both + a;
  return sum;
}

template <typename Kind>
__global__ void __launch_bounds__(kDecideThreads) decide_kernel(const __grid_constant__ NmsKernel p, int64_t first) {
  using Box = typename Kind::Box;
  constexpr int kWarps = kDecideThreads / 32;
  __shared__ uint32_t open[kWords], doubtful[kWords], keeps[kWords], hits[kWarps];
  __shared__ int32_t before[kWords];
  const int64_t image = blockIdx.x;
  const int64_t total = p.candidates(image);
  uint32_t* kept_count = p.at<uint32_t>(p.kept_count) + image;
  const int64_t kept = *kept_count;
  if (first >= total || kept >= p.kept) return;
  const int count = total - first < kChunk ? static_cast<int>(total - first) : kChunk;
  const bool fast = p.options.rotated == RotatedRule::kFast;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const Box* boxes = p.at<Box>(p.boxes) + image * p.capacity + first;
  const int32_t* classes = p.at<int32_t>(p.classes) + image * p.capacity + first;
  const uint32_t* masks = p.at<uint32_t>(p.masks) + image * kWords * kChunk;
  uint32_t* suppressed = p.at<uint32_t>(p.suppressed) + image * kWords;
  uint32_t* overlapped = p.at<uint32_t>(p.overlapped) + image * kWords;
  for (int i = thread; i < kChunk; i += kDecideThreads) {
    const unsigned finite = __ballot_sync(kFullWarp, i < count && classes[i] >= 0);
    if (lane == 0) {
      const uint32_t candidates = finite & ~suppressed[i / 32] & ~(fast ? overlapped[i / 32] : 0u);
      open[i / 32] = candidates;
      doubtful[i / 32] = fast ? 0u : candidates & overlapped[i / 32];
      keeps[i / 32] = candidates;                   // final unless some are doubtful
      suppressed[i / 32] = overlapped[i / 32] = 0;  // cleared for the next chunk
    }
  }
  __syncthreads();

  const int words = (count + 31) / 32;
  for (int block = 0; block < words; ++block) {
    const uint32_t checked = doubtful[block];
    if (!checked) continue;  // the same for the whole block
    const int i = block * 32 + lane;
    const bool check = (checked >> lane) & 1;
    uint32_t hit = 0;
    if (check) {
#pragma unroll 2
      for (int word = warp; word < block; word += kWarps) hit |= masks[word * kChunk + i] & keeps[word];
    }
    const uint32_t mine = check ? masks[block * kChunk + i] : 0;
    const unsigned hit_lanes = __ballot_sync(kFullWarp, hit != 0);
    if (lane == 0) hits[warp] = hit_lanes;
    __syncthreads();
    if (warp == 0) {
      uint32_t undecided = open[block], kept_here = 0;
      for (int w = 0; w < kWarps; ++w) undecided &= ~hits[w];
      while (undecided) {
        const bool waits = (undecided >> lane) & 1;
        const uint32_t found = __ballot_sync(kFullWarp, waits && !(mine & undecided));
        kept_here |= found;
        undecided &= ~found;
        undecided &= ~__ballot_sync(kFullWarp, (mine & kept_here) != 0);
      }
      if (lane == 0) keeps[block] = kept_here;
    }
    __syncthreads();
  }
  if (warp == 0) {
    const int sum = count_before(keeps, before, lane);
    if (lane == 31) {
      const int64_t all = kept + sum;
      *kept_count = static_cast<uint32_t>(all < p.kept ? all : p.kept);
    }
  }
  __syncthreads();
  for (int i = thread; i < count; i += kDecideThreads) {
    const uint32_t bits = keeps[i / 32];
    if (!((bits >> (i & 31)) & 1)) continue;
    const int64_t rank = kept + before[i / 32] + __popc(bits & ((1u << (i & 31)) - 1));
    if (rank >= p.kept) continue;
    const int64_t at = image * p.kept + rank;
    p.at<uint32_t>(p.kept_positions)[at] = static_cast<uint32_t>(first + i);
    if (fast) continue;
    p.at<Box>(p.kept_boxes)[at] = boxes[i];
    p.at<int32_t>(p.kept_classes)[at] = classes[i];
  }
}

template <typename Kind>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ NmsKernel p) {
  using A = typename Kind::A;
  const int64_t image = blockIdx.y, row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t kept = p.at<uint32_t>(p.kept_count)[image];
  if (row == 0) p.output.counts[image] = kept;
  if (row >= p.options.max_detections) return;
  if (row >= kept) {
    A* out = detection_row<A>(p, image, row);
    for (int64_t i = 0; i < 6 + p.source.extra; ++i) out[i] = A(0);
    p.output.indices[image * p.options.max_detections + row] = -1;
    return;
  }
  const auto key = sorted_keys<A>(p, image)[p.at<uint32_t>(p.kept_positions)[image * p.kept + row]];
  const uint32_t index = static_cast<uint32_t>(key), classes = static_cast<uint32_t>(p.source.classes);
  const uint32_t n = index / classes;
  const bool promoted = p.is_promoted(image);
  with_layout<A>(p.source, [&](auto layout) {
    using Layout = decltype(layout);
    Kind::template write<Layout>(p, image, row, n, Keys<A>::confidence(key), static_cast<int32_t>(index - n * classes));
    const A* letterbox = letterbox_row<A>(p.output, image);
    for (int64_t e = 0; e < p.source.extra; ++e) {
      detection_row<A>(p, image, row)[6 + e] =
          detection_extra<Layout>(p.source, p.options, image, n, e, promoted, letterbox);
    }
  });
}

template <typename Kind>
cudaError_t launch(const NmsKernel& kernel, const NmsPlan& plan, cudaStream_t stream) {
  const bool fast = plan.rotated == RotatedRule::kFast;
  const unsigned images = static_cast<unsigned>(plan.images);
  const int64_t decided = plan.capacity < kernel.options.max_candidates ? plan.capacity : kernel.options.max_candidates;
  place_kernel<Kind><<<dim3(static_cast<unsigned>(ceil_div(decided, kThreads)), images), kThreads, 0, stream>>>(kernel);
  for (int64_t first = 0; first < decided; first += kChunk) {
    // Launch the maximum of segments: all candidates before this chunk are kept, and the chunk itself.
    const int64_t before = fast || first < plan.kept ? first : plan.kept;
    const int64_t segments = ceil_div(before, kSegment) + kChunk / kSegment;
    test_kernel<Kind><<<dim3(static_cast<unsigned>(segments * kGroups), images), kThreads, 0, stream>>>(kernel, first);
    decide_kernel<Kind><<<images, kDecideThreads, 0, stream>>>(kernel, first);
  }
  const int64_t rows = ceil_div(kernel.options.max_detections, kThreads);
  rows_kernel<Kind><<<dim3(static_cast<unsigned>(rows), images), kThreads, 0, stream>>>(kernel);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_suppress_wide(const NmsKernel& kernel, const NmsPlan& plan, cudaStream_t stream) {
  const bool doubles = kernel.source.dtype == DType::kFloat64;
  if (plan.rotated != RotatedRule::kNone) {
    return doubles ? launch<Rotated<double>>(kernel, plan, stream) : launch<Rotated<float>>(kernel, plan, stream);
  }
  return doubles ? launch<Upright<double>>(kernel, plan, stream) : launch<Upright<float>>(kernel, plan, stream);
}

}  // namespace torch_fastdet::core
