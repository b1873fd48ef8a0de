// Assign anchors for a v8 loss: a block finds each target's best anchors, then a warp settles each shared slot.
#include "core/v8_loss/v8_best_anchors.cuh"
#include "core/v8_loss/v8_loss_launch.h"
#include "core/v8_loss/v8_masked_loss.h"
#include "core/v8_loss/v8_obb_loss.h"
#include "core/v8_loss/v8_posed_loss.h"

namespace torch_fastdet::core {
namespace {

// The greatest slot stays, and whoever finds the anchor taken marks it as shared. The first one does not know of the
// others, but the second sees the first's slot and stores the greater of both with the mark.
__device__ void claim_anchor(uint32_t* owner, uint32_t key) {
  const uint32_t held = atomicMax(owner, key);
  if (held == 0) return;
  const uint32_t unmarked = held & ~kV8Shared;
  atomicMax(owner, (unmarked > key ? unmarked : key) | kV8Shared);
}

// If fewer than topk anchors fit, name the image's first ones that do not, as v8_assign_loops.h does.
template <typename scalar_t, typename Params>
__device__ void name_misfits(const Params& params, const V8Target& target, int64_t first_slot, int found) {
  const V8Heads& heads = params.heads;
  const int lane = threadIdx.x % kWarp;
  int before = 0;
  for (int start = 0; start < params.topk; start += kWarp) {
    const int anchor = start + lane;
    bool misfit = false, inside = false;
    if (anchor < params.topk && anchor < heads.anchors) {
      const V8Anchor at = v8_anchor(heads, anchor);
      inside = v8_anchor_inside(params, target, at);
      misfit = !inside || v8_anchor_key<scalar_t>(params, target, at) == 0;
    }
    const unsigned misfits = __ballot_sync(kFullWarp, misfit);
    const int place = found + before + __popc(misfits & ((1u << lane) - 1));
    before += __popc(misfits);
    if (!misfit || !inside || place >= params.topk) continue;
    const int64_t named = target.image * heads.anchors + anchor;
    params.slots.anchor[first_slot + place] = named;
    claim_anchor(params.scratch.owner + named, static_cast<uint32_t>(first_slot + place + 1));
  }
}

template <typename scalar_t, typename Params>
__global__ void __launch_bounds__(kThreads) assign_kernel(const __grid_constant__ Params params) {
  const V8Heads& heads = params.heads;
  const int64_t which = blockIdx.x, first_slot = which * params.topk;
  int64_t* anchors = params.slots.anchor + first_slot;
  for (int i = threadIdx.x; i < params.topk; i += kThreads) anchors[i] = -1;
  if (which >= params.scratch.first_target[heads.bs]) return;
  const V8Target target = params.scratch.targets[which];
  const int found = best_anchors(
      params, target, params.topk, [&](const V8Anchor& at) { return v8_anchor_key<scalar_t>(params, target, at); },
      [&](int place, uint64_t key) {
        const int64_t anchor = target.image * heads.anchors + v8_key_index(key);
        anchors[place] = anchor;
        claim_anchor(params.scratch.owner + anchor, static_cast<uint32_t>(first_slot + place + 1));
      });
  if (threadIdx.x < kWarp && found < params.topk) name_misfits<scalar_t>(params, target, first_slot, found);
}

// Give a slot's anchor to the target that it fits best, or to its image's first, with weight 0. Each warp takes a slot.
template <typename scalar_t, typename Params>
__global__ void __launch_bounds__(kThreads) resolve_kernel(const __grid_constant__ Params params) {
  using T = arithmetic_t<scalar_t>;
  const V8Scratch& scratch = params.scratch;
  const int lane = threadIdx.x % kWarp;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (slot >= params.n * params.topk) return;
  const int64_t anchor = params.slots.anchor[slot];
  if (anchor < 0) return;
  const uint32_t owner = scratch.owner[anchor];
  __syncwarp();
  if ((owner & ~kV8Shared) != slot + 1) {
    if (lane == 0) params.slots.anchor[slot] = -1;
    return;
  }
  const bool shared = (owner & kV8Shared) != 0;
  const uint64_t best = shared ? warp_max(v8_best_target<scalar_t>(params, anchor, lane, kWarp)) : 0;
  if (lane != 0) return;
  v8_settle<scalar_t>(params, slot, shared, best);
  if (params.topk2 != params.topk) return;
  uint64_t* of_winner = scratch.best + 2 * scratch.winner[slot];
  raise_to(of_winner, static_cast<const T*>(scratch.alignment)[slot]);
  raise_to(of_winner + 1, static_cast<const T*>(scratch.overlap)[slot]);
}

// Keep a target's topk2 best anchors, as v8_assign_loops.h does. Each warp takes a slot.
template <typename T>
__global__ void __launch_bounds__(kThreads) filter_kernel(const __grid_constant__ V8LossParams params) {
  const V8Scratch& scratch = params.scratch;
  const int lane = threadIdx.x % kWarp;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (slot >= params.n * params.topk) return;
  const int64_t anchor = params.slots.anchor[slot];
  if (anchor < 0) return;
  const int64_t anchors = params.heads.anchors, image = anchor / anchors;
  const auto* alignment = static_cast<const T*>(scratch.alignment);
  const int32_t winner = scratch.winner[slot];
  const uint64_t key = v8_key(alignment[slot], anchor % anchors);
  const int64_t end = scratch.first_target[image + 1] * params.topk;
  int64_t better = key != 0 ? 0 : anchor % anchors;
  int mine = 0;
  for (int64_t i = scratch.first_target[image] * params.topk + lane; i < end; i += kWarp) {
    const int64_t other = params.slots.anchor[i];
    if (other < 0 || scratch.winner[i] != winner) continue;
    const uint64_t other_key = v8_key(alignment[i], other % anchors);
    if (key != 0 ? other_key > key : other_key != 0 && other > anchor) ++mine;
  }
  better += warp_sum(mine);
  if (lane != 0) return;
  const bool keep = better < params.topk2;
  static_cast<T*>(params.slots.score)[slot] = keep ? T(1) : T(0);
  if (!keep) return;
  raise_to(scratch.best + 2 * winner, alignment[slot]);
  raise_to(scratch.best + 2 * winner + 1, static_cast<const T*>(scratch.overlap)[slot]);
}

}  // namespace

template <typename Params>
cudaError_t launch_v8_assign(const Params& params, cudaStream_t stream) {
  return dispatch(params.heads.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    assign_kernel<scalar_t, Params><<<static_cast<unsigned>(params.n), kThreads, 0, stream>>>(params);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    const auto warps = static_cast<unsigned>(ceil_div(params.n * params.topk, kWarps));
    resolve_kernel<scalar_t, Params><<<warps, kThreads, 0, stream>>>(params);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    if (params.topk2 == params.topk) return cudaSuccess;
    filter_kernel<arithmetic_t<scalar_t>><<<warps, kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}
template cudaError_t launch_v8_assign(const V8LossParams&, cudaStream_t);
template cudaError_t launch_v8_assign(const V8ObbLossParams&, cudaStream_t);
template cudaError_t launch_v8_assign(const V8MaskedLossParams&, cudaStream_t);
template cudaError_t launch_v8_assign(const V8PosedLossParams&, cudaStream_t);

}  // namespace torch_fastdet::core
