// A block finds a target's best anchors.
#pragma once

#include "core/v8_loss/v8_loss_device.cuh"

namespace torch_fastdet::core {

// Hold a warp's best keys so far: lane i holds the i-th.
struct BestKeys {
  uint64_t held = 0;

  // Insert one key of each lane and drop keys that are not among the `wanted` best.
  __device__ void insert(uint64_t key, int wanted) {
    const int lane = threadIdx.x % kWarp;
    uint64_t least = __shfl_sync(kFullWarp, held, wanted - 1);
    unsigned pending = __ballot_sync(kFullWarp, key > least);
    for (; pending != 0; pending &= pending - 1) {
      const uint64_t candidate = __shfl_sync(kFullWarp, key, __ffs(static_cast<int>(pending)) - 1);
      if (candidate <= least) continue;
      const int place = __popc(__ballot_sync(kFullWarp, held > candidate));
      const uint64_t above = __shfl_up_sync(kFullWarp, held, 1);
      held = lane < place ? held : lane == place ? candidate : above;
      least = __shfl_sync(kFullWarp, held, wanted - 1);
    }
  }
};

// Insert the keys, below `bound`, of a level's anchors that lie inside a target.
template <typename Params, typename Key>
__device__ void rank_level(const Params& params, const V8Target& target, int which, uint64_t bound, int wanted,
                           const Key& key_of, BestKeys& best) {
  const V8Level& level = params.heads.levels[which];
  const V8Range range = v8_range(target, level.stride, level.nx, level.ny);
  const auto width = static_cast<uint32_t>(range.x1 - range.x0);
  const auto count = static_cast<uint32_t>((range.y1 - range.y0) * width);
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (uint32_t start = warp * kWarp; start < count; start += kThreads) {
    const uint32_t i = start + lane;
    uint64_t key = 0;
    if (i < count) {
      V8Anchor at{which, 0, range.x0 + i % width, range.y0 + i / width};
      at.index = at.row * level.nx + at.column;
      if (v8_anchor_inside(params, target, at)) key = key_of(at);
      if (key >= bound) key = 0;
    }
    best.insert(key, wanted);
  }
}

// Call emit(place, key) for the `count` greatest keys above 0 inside a target, and return their number. All threads
// must call this.
template <typename Params, typename Key, typename Emit>
__device__ int best_anchors(const Params& params, const V8Target& target, int count, const Key& key_of,
                            const Emit& emit) {
  __shared__ uint64_t keys[kThreads];
  __shared__ uint64_t last;
  __shared__ int found;
  if (threadIdx.x == 0) found = 0;
  uint64_t bound = ~uint64_t{0};
  for (int first = 0; first < count && bound != 0; first += kWarp) {  // a warp's list holds kWarp keys
    const int wanted = count - first < kWarp ? count - first : kWarp;
    BestKeys best;
    for (int level = 0; level < params.heads.num_levels; ++level) {
      rank_level(params, target, level, bound, wanted, key_of, best);
    }
    const uint64_t key = best.held;
    __syncthreads();
    keys[threadIdx.x] = key;
    if (threadIdx.x == 0) last = 0;
    __syncthreads();
    if (key != 0) {
      int rank = 0;
      for (const uint64_t other : keys) rank += other > key ? 1 : 0;
      if (rank < wanted) {
        emit(first + rank, key);
        atomicAdd(&found, 1);
        if (rank == wanted - 1) last = key;
      }
    }
    __syncthreads();
    bound = last;
  }
  return found;
}

}  // namespace torch_fastdet::core
