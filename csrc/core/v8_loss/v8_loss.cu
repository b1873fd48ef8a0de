// Kernels of the v8 detection loss. Forward: one launch prepares targets, decodes boxes and adds up the class entropy
// as if there were no targets; then a block a target finds its best anchors, a warp a slot settles anchors that several
// targets want, four threads a slot compute the terms, and one block adds them up. Backward: every gradient element
// once in memory order as if there were no targets, then the elements of the anchors in slots.
#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/v8_loss/v8_loss.h"

namespace torch_fastdet::core {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostClassBlocks = 1024;
constexpr int kChunk = 2048;  // elements of a dense tensor that a warp takes at once
constexpr int kSides = 4;
constexpr int kTermThreads = 128;
constexpr int kTermSlots = kTermThreads / kSides;
constexpr int kTerms = 4;  // sums over slots: scores, box, class, distance
constexpr int kFinishThreads = 1024;

__device__ uint64_t warp_max(uint64_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kFullWarp, value, step);
    value = other > value ? other : value;
  }
  return value;
}

__device__ void raise_to(uint64_t* place, double value) {
  atomicMax(reinterpret_cast<unsigned long long*>(place), static_cast<unsigned long long>(v8_order(value)));
}

// ---- Targets -------------------------------------------------------------------------------------------------------

// Targets of image `image`, in the order of their rows; how many come before, and whether rows are bad, every block
// finds out itself. One block.
__device__ void prepare_image(const V8LossParams& params, int64_t image) {
  __shared__ int64_t sums[kWarps][4];
  __shared__ int warp_counts[kWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const V8Heads& heads = params.heads;
  const V8Sides sides = v8_sides(params.settings);
  const int64_t claimed = params.num_targets ? *params.num_targets : params.n;
  const int64_t used = claimed < 0 ? 0 : claimed < params.n ? claimed : params.n;
  for (int64_t i = image * kThreads + threadIdx.x; i < 2 * params.n; i += heads.bs * kThreads) {
    params.scratch.best[i] = 0;
  }

  int64_t before = 0, mine = 0, faults = 0, fault_row = 0;
  for (int64_t i = threadIdx.x; i < used; i += kThreads) {
    const float* row = params.targets + 6 * i;
    if (const int fault = v8_target_fault(row, heads.bs, heads.nc); fault != 0) {
      ++faults;
      const int64_t first = kV8FirstFault - (6 * i + fault - 1);
      fault_row = first > fault_row ? first : fault_row;
      continue;
    }
    V8Target target{};
    if (!v8_target(row, heads.image_w, heads.image_h, sides, heads.nc, target)) continue;
    before += target.image < image ? 1 : 0;
    mine += target.image == image ? 1 : 0;
  }
  before = warp_sum(before);
  mine = warp_sum(mine);
  faults = warp_sum(faults);
  fault_row = static_cast<int64_t>(warp_max(static_cast<uint64_t>(fault_row)));
  if (lane == 0) {
    sums[warp][0] = before;
    sums[warp][1] = mine;
    sums[warp][2] = faults;
    sums[warp][3] = fault_row;
  }
  __syncthreads();
  before = mine = faults = fault_row = 0;
  for (int i = 0; i < kWarps; ++i) {
    before += sums[i][0];
    mine += sums[i][1];
    faults += sums[i][2];
    fault_row = sums[i][3] > fault_row ? sums[i][3] : fault_row;
  }
  if (threadIdx.x == 0) {
    params.scratch.first_target[image] = before;
    if (image == heads.bs - 1) params.scratch.first_target[heads.bs] = before + mine;
    if (image == 0) {
      params.status[0] = faults;
      params.status[1] = fault_row;
      params.status[2] = claimed == used ? 0 : claimed - params.n;
      params.status[3] = 0;
    }
  }

  int64_t next = before;
  for (int64_t start = 0; start < used; start += kThreads) {
    const int64_t i = start + threadIdx.x;
    V8Target target{};
    bool take = false;
    if (i < used) {
      const float* row = params.targets + 6 * i;
      take = v8_target_fault(row, heads.bs, heads.nc) == 0 &&
             v8_target(row, heads.image_w, heads.image_h, sides, heads.nc, target) && target.image == image;
    }
    const unsigned taken = __ballot_sync(kFullWarp, take);
    if (lane == 0) warp_counts[warp] = __popc(taken);
    __syncthreads();
    int64_t place = next + __popc(taken & ((1u << lane) - 1));
    for (int other = 0; other < kWarps; ++other) {
      if (other < warp) place += warp_counts[other];
      next += warp_counts[other];
    }
    if (take) {
      target.row = static_cast<int32_t>(i);
      params.scratch.targets[place] = target;
    }
    __syncthreads();
  }
}

// ---- Boxes and classes of all anchors ------------------------------------------------------------------------------

template <typename scalar_t>
struct Logits {
  const scalar_t* at;
  int64_t step;
  __device__ arithmetic_t<scalar_t> operator()(int i) const { return to_arithmetic(at[i * step]); }
};

// The logits of one side of an anchor's box.
template <typename scalar_t>
__device__ Logits<scalar_t> side_logits(const V8Heads& heads, int64_t b, const V8Anchor& at, int side) {
  const V8Level& level = heads.levels[at.level];
  const V8Tensor& tensor = heads.tensors[level.boxes];
  return {static_cast<const scalar_t*>(tensor.logits) + v8_logit(tensor, b, level.first_in_tensor + at.index) +
              side * heads.reg_max * tensor.stride_c,
          tensor.stride_c};
}

template <typename scalar_t>
__device__ arithmetic_t<scalar_t> class_logit(const V8Heads& heads, int64_t b, const V8Anchor& at, int label) {
  const V8Level& level = heads.levels[at.level];
  const V8Tensor& tensor = heads.tensors[level.classes];
  return to_arithmetic(
      static_cast<const scalar_t*>(tensor.logits)[v8_logit(tensor, b, level.first_in_tensor + at.index) +
                                                  (tensor.box_channels + label) * tensor.stride_c]);
}

template <typename scalar_t>
__device__ void decode_anchor(const V8LossParams& params, int64_t anchor) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  if (anchor >= heads.bs * heads.anchors) return;
  params.scratch.owner[anchor] = 0;
  const V8Anchor at = v8_anchor(heads, anchor % heads.anchors);
  T distance[kSides];
#pragma unroll
  for (int side = 0; side < kSides; ++side) {
    distance[side] = v8_side<T>(heads.reg_max, side_logits<scalar_t>(heads, anchor / heads.anchors, at, side)).distance;
  }
  const T x = T(at.column) + T(0.5), y = T(at.row) + T(0.5), stride = heads.levels[at.level].stride;
  static_cast<CornerBox<T>*>(params.scratch.boxes)[anchor] = {(x - distance[0]) * stride, (y - distance[1]) * stride,
                                                              (x + distance[2]) * stride, (y + distance[3]) * stride};
}

// Pieces of a tensor, for a warp each: of its class planes, of all its planes, or of its elements where it lies in
// rows.
__host__ __device__ int64_t plane_pieces(const V8Tensor& tensor) {
  return ceil_div(tensor.anchors, kChunk);
}

__host__ __device__ int64_t row_pieces(const V8Tensor& tensor, int64_t bs) {
  return ceil_div(bs * tensor.anchors * tensor.channels, kChunk);
}

__host__ __device__ int64_t class_pieces(const V8Tensor& tensor, int64_t bs) {
  if (tensor.channels == tensor.box_channels) return 0;
  return tensor.layout == V8Layout::kPlanes ? bs * (tensor.channels - tensor.box_channels) * plane_pieces(tensor)
                                            : row_pieces(tensor, bs);
}

__host__ __device__ int64_t gradient_pieces(const V8Tensor& tensor, int64_t bs) {
  return tensor.layout == V8Layout::kPlanes ? bs * tensor.channels * plane_pieces(tensor) : row_pieces(tensor, bs);
}

// Whether a tensor can be taken in vectors of `size` elements, none of which spans planes, or boxes and classes.
__device__ bool in_vectors(const V8Tensor& tensor, int size) {
  if (!tensor.dense || !is_vector_aligned(tensor.logits) || !is_vector_aligned(tensor.gradient)) return false;
  return tensor.layout == V8Layout::kPlanes ? tensor.anchors % size == 0
                                            : tensor.channels % size == 0 && tensor.box_channels % size == 0;
}

// Calls vector(e, channel) for vectors and element(e, channel) for single elements of a warp's piece: e counts in the
// tensor's own layout, `channel` is the first element's.
template <int kSize, typename OnVector, typename OnElement>
__device__ void visit_piece(const V8Tensor& tensor, int64_t piece, int first_channel, int64_t total, OnVector vector,
                            OnElement element) {
  const int lane = threadIdx.x % kWarp;
  const bool vectors = in_vectors(tensor, kSize);
  if (tensor.layout == V8Layout::kPlanes) {
    const int channels = tensor.channels - first_channel;
    const int64_t plane = piece / plane_pieces(tensor);
    const auto channel = static_cast<int>(plane % channels) + first_channel;
    const int64_t base = (plane / channels * tensor.channels + channel) * tensor.anchors;
    const int64_t begin = piece % plane_pieces(tensor) * kChunk;
    const int64_t end = begin + kChunk < tensor.anchors ? begin + kChunk : tensor.anchors;
    if (vectors) {
#pragma unroll 4
      for (int64_t i = begin + lane * kSize; i < end; i += kWarp * kSize) vector(base + i, channel);
    } else {
      for (int64_t i = begin + lane; i < end; i += kWarp) element(base + i, channel);
    }
    return;
  }
  const int64_t begin = piece * kChunk, end = begin + kChunk < total ? begin + kChunk : total;
  if (vectors) {
#pragma unroll 4
    for (int64_t i = begin + lane * kSize; i < end; i += kWarp * kSize) {
      vector(i, static_cast<int>(i % tensor.channels));
    }
  } else {
    for (int64_t i = begin + lane; i < end; i += kWarp) element(i, static_cast<int>(i % tensor.channels));
  }
}

// Where element e of the gradient's layout has its logit.
__device__ int64_t logit_of_element(const V8Tensor& tensor, int64_t e, int channel) {
  if (tensor.dense) return e;
  const int64_t planes = static_cast<int64_t>(tensor.channels) * tensor.anchors;
  const int64_t anchor = tensor.layout == V8Layout::kPlanes ? e % tensor.anchors : e / tensor.channels % tensor.anchors;
  return v8_logit(tensor, e / planes, anchor) + channel * tensor.stride_c;
}

template <typename T>
__device__ T class_weight(const void* weights, int label) {
  return weights ? static_cast<const T*>(weights)[label] : T(1);
}

// Sum of the class entropies of one piece if no class is to be found, this lane's share.
template <typename scalar_t>
__device__ arithmetic_t<scalar_t> class_sum(const V8LossParams& params, const V8Tensor& tensor, int64_t piece) {
  using T = arithmetic_t<scalar_t>;
  using Pack = Vector<scalar_t>;
  const auto* logits = static_cast<const scalar_t*>(tensor.logits);
  const void* weights = params.class_weights;
  const int boxes = tensor.box_channels;
  T sum = 0;
  visit_piece<Pack::kSize>(
      tensor, piece, boxes, params.heads.bs * tensor.anchors * tensor.channels,
      [&](int64_t e, int channel) {
        if (channel < boxes) return;
        const Pack pack = *reinterpret_cast<const Pack*>(logits + e);
        const int next = tensor.layout == V8Layout::kRows ? 1 : 0;  // from one element's channel to the next one's
#pragma unroll
        for (int i = 0; i < Pack::kSize; ++i) {
          const T entropy = v8_softplus(to_arithmetic(pack.x[i]));
          sum += weights ? entropy * class_weight<T>(weights, channel - boxes + i * next) : entropy;
        }
      },
      [&](int64_t e, int channel) {
        if (channel < boxes) return;
        const T entropy = v8_softplus(to_arithmetic(logits[logit_of_element(tensor, e, channel)]));
        sum += entropy * class_weight<T>(weights, channel - boxes);
      });
  return sum;
}

template <typename scalar_t>
__device__ void sum_classes(const V8LossParams& params, int64_t block, int64_t blocks) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const int warp = threadIdx.x / kWarp;
  T sum = 0;
  int64_t first = 0;  // pieces of the tensors before
  for (int t = 0; t < heads.num_tensors; ++t) {
    const V8Tensor& tensor = heads.tensors[t];
    const int64_t end = first + class_pieces(tensor, heads.bs), stride = blocks * kWarps;
    int64_t piece = block * kWarps + warp;
    if (piece < first) piece += ceil_div(first - piece, stride) * stride;
    for (; piece < end; piece += stride) sum += class_sum<scalar_t>(params, tensor, piece - first);
    first = end;
  }
  sum = sum_of_warps<kWarps>(warp_sum(sum));
  if (threadIdx.x == 0) static_cast<T*>(params.scratch.class_partials)[block] = sum;
}

__host__ __device__ int64_t decode_blocks(const V8Heads& heads) {
  return ceil_div(heads.bs * heads.anchors, kThreads);
}

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) start_kernel(const __grid_constant__ V8LossParams params) {
  int64_t block = blockIdx.x;
  if (block < params.heads.bs) return prepare_image(params, block);
  block -= params.heads.bs;
  const int64_t decoding = decode_blocks(params.heads);
  if (block < decoding) return decode_anchor<scalar_t>(params, block * kThreads + threadIdx.x);
  sum_classes<scalar_t>(params, block - decoding, gridDim.x - params.heads.bs - decoding);
}

// ---- Assignment ----------------------------------------------------------------------------------------------------

// A warp's best keys so far: lane i holds the i-th.
struct BestKeys {
  uint64_t held = 0;

  // Takes in one key a lane; those that do not belong to the `wanted` best are dropped.
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

// The greatest slot stays; whoever finds the anchor taken marks it as shared. The first one does not know of the
// others, but the second sees the first's slot and puts the greater of both back with the mark.
__device__ void claim_anchor(uint32_t* owner, uint32_t key) {
  const uint32_t held = atomicMax(owner, key);
  if (held == 0) return;
  const uint32_t unmarked = held & ~kV8Shared;
  atomicMax(owner, (unmarked > key ? unmarked : key) | kV8Shared);
}

// How an anchor inside of a target ranks among those.
template <typename scalar_t>
__device__ uint64_t anchor_key(const V8LossParams& params, const V8Target& target, const V8Anchor& at) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const int64_t anchor = heads.levels[at.level].first + at.index;
  const T overlap =
      v8_overlap(target, static_cast<const CornerBox<T>*>(params.scratch.boxes)[target.image * heads.anchors + anchor]);
  return v8_key(v8_alignment(class_logit<scalar_t>(heads, target.image, at, target.lookup), overlap,
                             static_cast<T>(params.settings[kV8Alpha]), static_cast<T>(params.settings[kV8Beta])),
                anchor);
}

__device__ bool is_inside(const V8Heads& heads, const V8Target& target, const V8Anchor& at) {
  const float stride = heads.levels[at.level].stride;
  return v8_inside(target, v8_center(at.column, stride), v8_center(at.row, stride));
}

// The keys of the anchors of one level inside of a target, below `bound`.
template <typename scalar_t>
__device__ void rank_level(const V8LossParams& params, const V8Target& target, int which, uint64_t bound, int wanted,
                           BestKeys& best) {
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
      if (is_inside(params.heads, target, at)) key = anchor_key<scalar_t>(params, target, at);
      if (key >= bound) key = 0;
    }
    best.insert(key, wanted);
  }
}

// Where fewer than topk anchors fit, the first anchors of the image that do not fit are named too, if they lie inside
// of the target, as a top-k over all anchors does whose ties go by index. They have no weight, but others may want
// them.
template <typename scalar_t>
__device__ void name_misfits(const V8LossParams& params, const V8Target& target, int64_t first_slot, int found) {
  const V8Heads& heads = params.heads;
  const int lane = threadIdx.x % kWarp;
  int before = 0;
  for (int start = 0; start < params.topk; start += kWarp) {
    const int anchor = start + lane;
    bool misfit = false, inside = false;
    if (anchor < params.topk && anchor < heads.anchors) {
      const V8Anchor at = v8_anchor(heads, anchor);
      inside = is_inside(heads, target, at);
      misfit = !inside || anchor_key<scalar_t>(params, target, at) == 0;
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

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) assign_kernel(const __grid_constant__ V8LossParams params) {
  __shared__ uint64_t keys[kThreads];
  __shared__ uint64_t last;
  __shared__ int found;
  const V8Heads& heads = params.heads;
  const int64_t which = blockIdx.x, first_slot = which * params.topk;
  int64_t* anchors = params.slots.anchor + first_slot;
  for (int i = threadIdx.x; i < params.topk; i += kThreads) anchors[i] = -1;
  if (which >= params.scratch.first_target[heads.bs]) return;
  const V8Target target = params.scratch.targets[which];
  if (threadIdx.x == 0) found = 0;
  uint64_t bound = ~uint64_t{0};
  for (int first = 0; first < params.topk && bound != 0; first += kWarp) {  // a warp's list holds so many
    const int wanted = params.topk - first < kWarp ? params.topk - first : kWarp;
    BestKeys best;
    for (int level = 0; level < heads.num_levels; ++level) {
      rank_level<scalar_t>(params, target, level, bound, wanted, best);
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
        const int64_t anchor = target.image * heads.anchors + v8_key_index(key);
        anchors[first + rank] = anchor;
        claim_anchor(params.scratch.owner + anchor, static_cast<uint32_t>(first_slot + first + rank + 1));
        atomicAdd(&found, 1);
        if (rank == wanted - 1) last = key;
      }
    }
    __syncthreads();
    bound = last;
  }
  if (threadIdx.x < kWarp && found < params.topk) name_misfits<scalar_t>(params, target, first_slot, found);
}

// A slot's anchor goes to the target that it fits best, if several want it. A warp a slot.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) resolve_kernel(const __grid_constant__ V8LossParams params) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
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
  const int64_t image = anchor / heads.anchors;
  const V8Anchor at = v8_anchor(heads, anchor % heads.anchors);
  const CornerBox<T> box = static_cast<const CornerBox<T>*>(scratch.boxes)[anchor];
  int64_t winner = slot / params.topk;
  if (owner & kV8Shared) {
    const float stride = heads.levels[at.level].stride;
    const float x = v8_center(at.column, stride), y = v8_center(at.row, stride);
    const int64_t first = scratch.first_target[image], end = scratch.first_target[image + 1];
    uint64_t best = 0;
    for (int64_t i = first + lane; i < end; i += kWarp) {
      if (!v8_inside(scratch.targets[i], x, y)) continue;
      const uint64_t key = v8_key(v8_overlap(scratch.targets[i], box), i);
      best = key > best ? key : best;
    }
    best = warp_max(best);
    if (best != 0) winner = v8_key_index(best);
  }
  if (lane != 0) return;
  const V8Target& target = scratch.targets[winner];
  const T overlap = v8_overlap(target, box);
  const T alignment = v8_alignment(class_logit<scalar_t>(heads, image, at, target.lookup), overlap,
                                   static_cast<T>(params.settings[kV8Alpha]), static_cast<T>(params.settings[kV8Beta]));
  scratch.winner[slot] = static_cast<int32_t>(winner);
  static_cast<T*>(scratch.overlap)[slot] = overlap;
  static_cast<T*>(scratch.alignment)[slot] = alignment;
  if (params.topk2 != params.topk) return;
  raise_to(scratch.best + 2 * winner, alignment);
  raise_to(scratch.best + 2 * winner + 1, overlap);
}

// Of the anchors that a target got, its topk2 best are kept. A warp a slot.
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
  int better = 0;
  for (int64_t i = scratch.first_target[image] * params.topk + lane; i < end; i += kWarp) {
    const int64_t other = params.slots.anchor[i];
    if (other >= 0 && scratch.winner[i] == winner && v8_key(alignment[i], other % anchors) > key) ++better;
  }
  better = warp_sum(better);
  if (lane != 0) return;
  const bool keep = key != 0 && better < params.topk2;
  static_cast<T*>(params.slots.score)[slot] = keep ? T(1) : T(0);
  if (!keep) return;
  raise_to(scratch.best + 2 * winner, alignment[slot]);
  raise_to(scratch.best + 2 * winner + 1, static_cast<const T*>(scratch.overlap)[slot]);
}

// ---- Terms and gradients of the anchors in slots -------------------------------------------------------------------

// Four threads a slot, each with a side of the box. All lanes of the warp call it.
template <typename T>
__device__ void exchange_sides(T mine, T (&all)[kSides]) {
  const int first = threadIdx.x % kWarp / kSides * kSides;
#pragma unroll
  for (int side = 0; side < kSides; ++side) all[side] = __shfl_sync(kFullWarp, mine, first + side);
}

// One cell as a share of the image's side that `side` is measured along.
template <typename T>
__device__ T cell_share(const V8Heads& heads, const V8Anchor& at, int side) {
  return T(heads.levels[at.level].stride) / T(side % 2 == 0 ? heads.image_w : heads.image_h);
}

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
  __syncwarp();  // all four have read the score

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

// One block.
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
  const double scores = sums[0] < 1 ? 1 : sums[0];  // NaN stays
  const double raw[3] = {sums[1], sums[2] + sums[kTerms], sums[3]};
  const double all = static_cast<double>(params.heads.bs) * params.settings[kV8Weight];
  for (int part = 0; part < 3; ++part) {
    const double gain = params.settings[kV8Box + part] / scores;
    static_cast<T*>(params.items)[part] = static_cast<T>(raw[part] * gain);
    static_cast<T*>(params.loss)[part] = static_cast<T>(raw[part] * gain * all);
    static_cast<T*>(params.slots.scales)[part] = static_cast<T>(gain * all);
  }
}

template <typename T>
__device__ T gradient_scale(const V8LossBackwardParams& params, int part) {
  return static_cast<const T*>(params.grad_loss)[part * params.grad_stride] *
         static_cast<const T*>(params.slots.scales)[part];
}

// Every gradient as if there were no targets: sigmoids for the classes, zeros for the boxes.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) dense_kernel(const __grid_constant__ V8LossBackwardParams params) {
  using T = arithmetic_t<scalar_t>;
  using Pack = Vector<scalar_t>;
  const V8Heads& heads = params.heads;
  int64_t piece = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  int which = 0;
  for (; which < heads.num_tensors; ++which) {
    const int64_t pieces = gradient_pieces(heads.tensors[which], heads.bs);
    if (piece < pieces) break;
    piece -= pieces;
  }
  if (which == heads.num_tensors) return;
  const V8Tensor& tensor = heads.tensors[which];
  const auto* logits = static_cast<const scalar_t*>(tensor.logits);
  auto* gradient = static_cast<scalar_t*>(tensor.gradient);
  const void* weights = params.class_weights;
  const int boxes = tensor.box_channels;
  const T scale = gradient_scale<T>(params, 1);
  const scalar_t zero = from_arithmetic<scalar_t>(0);
  visit_piece<Pack::kSize>(
      tensor, piece, 0, heads.bs * tensor.anchors * tensor.channels,
      [&](int64_t e, int channel) {
        Pack pack;
        if (channel < boxes) {
#pragma unroll
          for (int i = 0; i < Pack::kSize; ++i) pack.x[i] = zero;
        } else {
          pack = *reinterpret_cast<const Pack*>(logits + e);
          const int next = tensor.layout == V8Layout::kRows ? 1 : 0;
#pragma unroll
          for (int i = 0; i < Pack::kSize; ++i) {
            const T weighted = weights ? scale * class_weight<T>(weights, channel - boxes + i * next) : scale;
            pack.x[i] = from_arithmetic<scalar_t>(sigmoid(to_arithmetic(pack.x[i])) * weighted);
          }
        }
        *reinterpret_cast<Pack*>(gradient + e) = pack;
      },
      [&](int64_t e, int channel) {
        if (channel < boxes) {
          gradient[e] = zero;
          return;
        }
        const T logit = to_arithmetic(logits[logit_of_element(tensor, e, channel)]);
        gradient[e] = from_arithmetic<scalar_t>(sigmoid(logit) * scale * class_weight<T>(weights, channel - boxes));
      });
}

template <typename scalar_t>
__global__ void __launch_bounds__(kTermThreads)
    slot_gradient_kernel(const __grid_constant__ V8LossBackwardParams params) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const int side = threadIdx.x % kSides;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kTermSlots + threadIdx.x / kSides;
  const int64_t anchor = slot < params.n * params.topk ? params.slots.anchor[slot] : -1;
  V8Anchor at{};
  V8Target target{};
  V8Side<T> mine{};
  Logits<scalar_t> logits{};
  int64_t image = 0;
  if (anchor >= 0) {
    image = anchor / heads.anchors;
    at = v8_anchor(heads, anchor % heads.anchors);
    v8_target(params.targets + 6 * params.slots.row[slot], heads.image_w, heads.image_h, {}, heads.nc, target);
    logits = side_logits<scalar_t>(heads, image, at, side);
    mine = v8_side<T>(heads.reg_max, logits);
  }
  T distance[kSides], by_distance[kSides];
  exchange_sides(mine.distance, distance);
  if (anchor < 0) return;
  const V8Pair<T> pair = v8_pair(target, at.column, at.row, T(heads.levels[at.level].stride));
  v8_box_term(pair, distance, by_distance);
  const T score = static_cast<const T*>(params.slots.score)[slot];
  const T by_side = (side == 0   ? by_distance[0]
                     : side == 1 ? by_distance[1]
                     : side == 2 ? by_distance[2]
                                 : by_distance[3]) *
                    (score * gradient_scale<T>(params, 0));
  const T scale = score * gradient_scale<T>(params, 2);
  const T wanted = v8_wanted_distance(pair, side), share = cell_share<T>(heads, at, side);
  const V8Level& level = heads.levels[at.level];
  const V8Tensor& boxes = heads.tensors[level.boxes];
  const int64_t in_tensor = level.first_in_tensor + at.index, step = v8_gradient_step(boxes);
  scalar_t* out = static_cast<scalar_t*>(boxes.gradient) + v8_gradient(boxes, image, side * heads.reg_max, in_tensor);
  for (int i = 0; i < heads.reg_max; ++i) {
    out[i * step] =
        from_arithmetic<scalar_t>(v8_side_gradient(mine, wanted, share, heads.reg_max, logits, i, by_side, scale));
  }
  if (side != 0) return;
  const V8Tensor& classes = heads.tensors[level.classes];
  const T logit = class_logit<scalar_t>(heads, image, at, target.label);
  static_cast<scalar_t*>(
      classes.gradient)[v8_gradient(classes, image, classes.box_channels + target.label, in_tensor)] =
      from_arithmetic<scalar_t>((sigmoid(logit) - score) * gradient_scale<T>(params, 1) *
                                class_weight<T>(params.class_weights, target.label));
}

}  // namespace

int64_t v8_slot_blocks(const V8LossParams& params) {
  return ceil_div(params.n * params.topk, kTermSlots);
}

int64_t v8_class_blocks(const V8LossParams& params) {
  int64_t pieces = 0;
  for (int t = 0; t < params.heads.num_tensors; ++t) pieces += class_pieces(params.heads.tensors[t], params.heads.bs);
  const int64_t blocks = ceil_div(pieces, kWarps);
  return blocks < kMostClassBlocks ? blocks : kMostClassBlocks;
}

cudaError_t launch_v8_loss(const V8LossParams& params, cudaStream_t stream) {
  return dispatch(params.heads.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    using T = arithmetic_t<scalar_t>;
    const int64_t slots = params.n * params.topk, slot_blocks = v8_slot_blocks(params);
    const int64_t class_blocks = v8_class_blocks(params);
    const auto blocks = static_cast<unsigned>(params.heads.bs + decode_blocks(params.heads) + class_blocks);
    start_kernel<scalar_t><<<blocks, kThreads, 0, stream>>>(params);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    if (slots > 0) {
      assign_kernel<scalar_t><<<static_cast<unsigned>(params.n), kThreads, 0, stream>>>(params);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
      const auto warps = static_cast<unsigned>(ceil_div(slots, kWarps));
      resolve_kernel<scalar_t><<<warps, kThreads, 0, stream>>>(params);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
      if (params.topk2 != params.topk) {
        filter_kernel<T><<<warps, kThreads, 0, stream>>>(params);
        if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
      }
      terms_kernel<scalar_t><<<static_cast<unsigned>(slot_blocks), kTermThreads, 0, stream>>>(params);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    finish_kernel<T><<<1, kFinishThreads, 0, stream>>>(params, slot_blocks, class_blocks);
    return cudaGetLastError();
  });
}

cudaError_t launch_v8_loss_backward(const V8LossBackwardParams& params, cudaStream_t stream) {
  return dispatch(params.heads.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    int64_t pieces = 0;
    for (int t = 0; t < params.heads.num_tensors; ++t) {
      pieces += gradient_pieces(params.heads.tensors[t], params.heads.bs);
    }
    dense_kernel<scalar_t><<<static_cast<unsigned>(ceil_div(pieces, kWarps)), kThreads, 0, stream>>>(params);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess || params.n == 0) return error;
    const auto blocks = static_cast<unsigned>(ceil_div(params.n * params.topk, kTermSlots));
    slot_gradient_kernel<scalar_t><<<blocks, kTermThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace torch_fastdet::core
