// Define the keys, workspace and parameters that the kernels of non-maximum suppression share.
#pragma once

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/nms/candidates.h"
#include "core/nms/nms_plan.h"

namespace torch_fastdet::core {

// Encode (descending confidence, ascending index) as one ascending unsigned key. Confidences are positive and finite.
template <typename A>
struct Keys;

template <>
struct Keys<float> {
  using Key = uint64_t;
  static constexpr int kTile = nms_tile(false), kChunk = nms_chunk(false);
  static __device__ __forceinline__ Key make(float confidence, uint32_t index) {
    return static_cast<Key>(0x7fffffffu - __float_as_uint(confidence)) << 32 | index;
  }
  static __device__ __forceinline__ float confidence(Key key) {
    return __uint_as_float(0x7fffffffu - static_cast<uint32_t>(key >> 32));
  }
};

template <>
struct Keys<double> {
  using Key = unsigned __int128;
  static constexpr int kTile = nms_tile(true), kChunk = nms_chunk(true);
  static __device__ __forceinline__ Key make(double confidence, uint32_t index) {
    const uint64_t bits = 0x7fffffffffffffffull - static_cast<uint64_t>(__double_as_longlong(confidence));
    return static_cast<Key>(bits) << 32 | index;
  }
  static __device__ __forceinline__ double confidence(Key key) {
    return __longlong_as_double(static_cast<int64_t>(0x7fffffffffffffffull - static_cast<uint64_t>(key >> 32)));
  }
};

template <typename A>
using key_of = typename Keys<A>::Key;

// Hold the cut of an image: once `decided`, keys with (key >> shift) <= prefix are kept.
template <typename Key>
struct CutState {
  Key prefix;
  uint32_t better;     // candidates before the prefix
  uint32_t above_one;  // whether any class score exceeds 1
  uint16_t shift, decided;
};
static_assert(sizeof(CutState<unsigned __int128>) <= 32);

struct NmsKernel : NmsOffsets {
  CandidateSource source;
  NmsOptions options;
  NmsOutput output;
  char* workspace;
  int64_t capacity, kept;
  int32_t merges;
  bool cuts;
  bool sorts_small;  // the suppressing block sorts an image of up to kSelfSorted candidates itself

  template <typename T>
  __device__ __forceinline__ T* at(size_t offset) const {
    return reinterpret_cast<T*>(workspace + offset);
  }
  __device__ __forceinline__ bool is_promoted(int64_t image) const {
    return source.label_count && at<uint8_t>(promoted)[image];
  }
  // Return how many candidates an image's buffer holds, even if the source changed between passes.
  __device__ __forceinline__ int64_t buffered(int64_t image) const {
    const uint32_t count = at<uint32_t>(found)[image];
    const int64_t waiting = cuts && count > capacity ? at<uint32_t>(gathered)[image] : count;
    return waiting < capacity ? waiting : capacity;
  }
  __device__ __forceinline__ int64_t candidates(int64_t image) const {
    const int64_t count = buffered(image);
    return count < options.max_candidates ? count : options.max_candidates;
  }
};

template <typename A, typename F>
__device__ __forceinline__ void with_layout(const CandidateSource& source, F&& f) {
  const auto stored = [&](auto zero) {
    using T = decltype(zero);
    switch (source.layout) {
      case CandidateLayout::kPrediction:
        return f(PredictionLayout<T>{});
      case CandidateLayout::kAnchorHeads:
        return f(AnchorHeadLayout<T>{});
      case CandidateLayout::kAnchorFreeHeads:
        return f(AnchorFreeHeadLayout<T>{});
    }
  };
  if constexpr (sizeof(A) == 8) {
    stored(double{});
  } else {
    switch (source.dtype) {
      case DType::kFloat16:
        return stored(__half{});
      case DType::kBFloat16:
        return stored(__nv_bfloat16{});
      default:
        return stored(float{});
    }
  }
}

// Return the bits of kCount `boxes` that suppress `mine` if kept. Compare without branches, then divide for the few.
template <typename A, int kCount>
__device__ __forceinline__ uint32_t suppressors(const CornerBox<A>* boxes, const int32_t* classes,
                                                const CornerBox<A>& mine, int32_t my_class, bool same_class,
                                                A threshold) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const CornerBox<A> other = boxes[j];  // one 16-byte load, whatever the comparisons give
    bits |= proper_boxes_meet(other, mine) ? 1u << j : 0u;
  }
  for (uint32_t rest = bits; rest; rest &= rest - 1) {
    const int j = __ffs(rest) - 1;
    if ((same_class && classes[j] != my_class) || !meeting_boxes_overlap(boxes[j], mine, threshold)) bits &= ~(1u << j);
  }
  return bits;
}

cudaError_t launch_select(const NmsKernel& kernel, const NmsPlan& plan, const ClassFilter& filter, cudaStream_t stream);
cudaError_t launch_sort(const NmsKernel& kernel, const NmsPlan& plan, cudaStream_t stream);
cudaError_t launch_suppress(const NmsKernel& kernel, const NmsPlan& plan, cudaStream_t stream);
cudaError_t launch_suppress_wide(const NmsKernel& kernel, const NmsPlan& plan, cudaStream_t stream);

}  // namespace torch_fastdet::core
