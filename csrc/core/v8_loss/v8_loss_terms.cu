// Compute the terms of a v8 loss with four threads a slot, and add them up in one block.
#include "core/v8_loss/v8_loss_device.cuh"
#include "core/v8_loss/v8_loss_launch.h"

namespace torch_fastdet::core {
namespace {

constexpr int kFinishThreads = 1024;

template <typename scalar_t>
__global__ void __launch_bounds__(kTermThreads) terms_kernel(const __grid_constant__ V8LossParams params) {
  using T = arithmetic_t<scalar_t>;
  __shared__ T terms[kTermSlots][kTerms];
  const V8Heads& heads = params.heads;
  const V8Scratch& scratch = params.scratch;
  const int side = threadIdx.x % kSides;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kTermSlots + threadIdx.x / kSides;
  int64_t anchor = slot < params.n * params.topk ? params.slots.anchor[slot] : -1;
  T* scores = static_cast<T*>(params.slots.score);
  const bool dropped = anchor >= 0 && params.topk2 != params.topk && scores[slot] == T(0);
  if (dropped) anchor = -1;
  __syncwarp();  // all four threads have read the score

  V8Anchor at{};
  V8Pair<T> pair{};
  V8Side<T> mine{};
  T distance_term = 0, score = 0, class_term = 0;
  if (anchor >= 0) {
    const int64_t image = anchor / heads.anchors;
    at = v8_anchor(heads, anchor % heads.anchors);
    const int32_t winner = scratch.winner[slot];
    const V8Target target = scratch.targets[winner];
    score = v8_score(static_cast<const T*>(scratch.alignment)[slot], scratch.best[2 * winner],
                     scratch.best[2 * winner + 1], static_cast<T>(params.settings[kV8Eps]));
    pair = v8_pair(target, at.column, at.row, T(heads.levels[at.level].stride));
    const auto logits = side_logits<scalar_t>(heads, image, at, side);
    mine = v8_side<T>(heads.reg_max, logits);
    distance_term =
        v8_distance_term(mine, v8_wanted_distance(pair, side), cell_share<T>(heads, at, side), heads.reg_max, logits);
    if (side == 0) {
      class_term = -score * class_weight<T>(params.class_weights, target.label) *
                   class_logit<scalar_t>(heads, image, at, target.label);
      params.slots.row[slot] = target.row;
      scores[slot] = score;
    }
  } else if (side == 0 && slot < params.n * params.topk) {
    params.slots.row[slot] = -1;
    scores[slot] = T(0);
  }
  T distance[kSides], distance_terms[kSides], gradient[kSides];
  exchange_sides(mine.distance, distance);
  exchange_sides(distance_term, distance_terms);
  if (dropped && side == 0) params.slots.anchor[slot] = -1;
  if (side == 0) {
    T* mine = terms[threadIdx.x / kSides];
    mine[0] = score;
    mine[1] = anchor < 0 ? T(0) : score * (T(1) - v8_box_term(pair, distance, gradient));
    mine[2] = class_term;
    mine[3] = score * (((distance_terms[0] + distance_terms[1]) + distance_terms[2]) + distance_terms[3]);
  }
  __syncthreads();
  if (threadIdx.x >= kTerms) return;
  T sum = 0;
  for (int i = 0; i < kTermSlots; ++i) sum += terms[i][threadIdx.x];
  static_cast<T*>(scratch.slot_partials)[static_cast<int64_t>(blockIdx.x) * kTerms + threadIdx.x] = sum;
}

template <typename T>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ V8LossParams params, int64_t slot_blocks, int64_t class_blocks) {
  const auto* slot_partials = static_cast<const T*>(params.scratch.slot_partials);
  const auto* class_partials = static_cast<const T*>(params.scratch.class_partials);
  double sums[kTerms + 1] = {};
  for (int64_t i = threadIdx.x; i < slot_blocks; i += kFinishThreads) {
    for (int term = 0; term < kTerms; ++term) sums[term] += static_cast<double>(slot_partials[i * kTerms + term]);
  }
  for (int64_t i = threadIdx.x; i < class_blocks; i += kFinishThreads) {
    sums[kTerms] += static_cast<double>(class_partials[i]);
  }
  block_sum<kFinishThreads>(sums);
  if (threadIdx.x != 0) return;
  const double raw[3] = {sums[1], sums[2] + sums[kTerms], sums[3]};
  v8_finish<T>(params, sums[0], raw);
}

}  // namespace

int64_t v8_slot_blocks(const V8LossParams& params) {
  return ceil_div(params.n * params.topk, kTermSlots);
}

cudaError_t launch_v8_terms(const V8LossParams& params, cudaStream_t stream) {
  return dispatch(params.heads.dtype, [&](auto zero) {
    terms_kernel<decltype(zero)><<<static_cast<unsigned>(v8_slot_blocks(params)), kTermThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t launch_v8_finish(const V8LossParams& params, int64_t class_blocks, cudaStream_t stream) {
  return dispatch(params.heads.dtype, [&](auto zero) {
    using T = arithmetic_t<decltype(zero)>;
    finish_kernel<T><<<1, kFinishThreads, 0, stream>>>(params, v8_slot_blocks(params), class_blocks);
    return cudaGetLastError();
  });
}

}  // namespace torch_fastdet::core
