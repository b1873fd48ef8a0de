// Compute the v8 losses' targets, boxes and assignment on the CPU, in parallel by parallel_for(begin, end, grain, f).
#pragma once

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "core/common/instruction_set.h"
#include "core/v8_loss/v8_loss.h"

namespace torch_fastdet::core::v8_loops {

constexpr int kBlock = 64;     // anchors or logits that are gathered for vector instructions
constexpr int kMostBins = 64;  // in such a block; heads have 16
constexpr int64_t kSlotGrain = 64;

template <typename T>
using Block = T[kBlock];

// Compute the distance of one side for the anchors of a block.
template <typename T>
void expectation_loop(int reg_max, const Block<T>* bins, Block<T>& distance) {
  Block<T> highest, total, weighted;
  for (int i = 0; i < kBlock; ++i) highest[i] = bins[0][i];
  for (int bin = 1; bin < reg_max; ++bin) {
    for (int i = 0; i < kBlock; ++i) highest[i] = bins[bin][i] > highest[i] ? bins[bin][i] : highest[i];
  }
  for (int i = 0; i < kBlock; ++i) total[i] = weighted[i] = 0;
  for (int bin = 0; bin < reg_max; ++bin) {
    for (int i = 0; i < kBlock; ++i) {
      const T weight = exp_rn(sub_rn(bins[bin][i], highest[i]));
      total[i] = add_rn(total[i], weight);
      weighted[i] = add_rn(weighted[i], mul_rn(weight, T(bin)));
    }
  }
  for (int i = 0; i < kBlock; ++i) distance[i] = div_rn(weighted[i], total[i]);
}

template <typename Params>
void prepare_targets(const Params& params, int64_t count) {
  const V8Heads& heads = params.heads;
  std::fill_n(params.status, kV8StatusSize, int64_t{0});
  std::fill_n(params.scratch.best, 2 * params.n, uint64_t{0});
  const V8Sides sides = v8_sides(params.settings);
  std::vector<V8Target> kept;
  for (int64_t i = 0; i < count; ++i) {
    V8Target target;
    if (!v8_read_target(params, v8_row(params, i), sides, target)) continue;
    target.row = static_cast<int32_t>(i);
    kept.push_back(target);
  }
  int64_t* first = params.scratch.first_target;
  std::fill_n(first, heads.bs + 1, int64_t{0});
  for (const V8Target& target : kept) ++first[target.image + 1];
  for (int64_t b = 0; b < heads.bs; ++b) first[b + 1] += first[b];
  std::vector<int64_t> next(first, first + heads.bs);
  for (const V8Target& target : kept) params.scratch.targets[next[target.image]++] = target;
}

template <typename scalar_t, typename Params>
void decode_block(const Params& params, int64_t image, int which, int64_t begin) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const V8Level& level = heads.levels[which];
  const V8Tensor& tensor = heads.tensors[level.boxes];
  const auto count = static_cast<int>(std::min<int64_t>(kBlock, level.ny * level.nx - begin));
  const auto* logits = static_cast<const scalar_t*>(tensor.logits);
  int64_t offsets[kBlock];
  for (int i = 0; i < count; ++i) offsets[i] = v8_logit(tensor, image, level.first_in_tensor + begin + i);
  Block<T> distance[4], bins[kMostBins] = {};
  for (int side = 0; side < 4; ++side) {
    if (heads.reg_max == 1 || heads.reg_max > kMostBins) {
      for (int i = 0; i < count; ++i) {
        distance[side][i] =
            v8_side<T>(heads.reg_max, side_logits<scalar_t>(heads, image, {which, begin + i, 0, 0}, side)).distance;
      }
      continue;
    }
    for (int bin = 0; bin < heads.reg_max; ++bin) {
      const scalar_t* at = logits + (side * heads.reg_max + bin) * tensor.stride_c;
      for (int i = 0; i < count; ++i) bins[bin][i] = to_arithmetic(at[offsets[i]]);
    }
    vectorised([&] { expectation_loop(heads.reg_max, bins, distance[side]); });
  }
  auto* boxes = static_cast<CornerBox<T>*>(params.scratch.boxes) + image * heads.anchors + level.first + begin;
  const T stride = level.stride;
  for (int i = 0; i < count; ++i) {
    const T sides[4] = {distance[0][i], distance[1][i], distance[2][i], distance[3][i]};
    boxes[i] = v8_place_box<scalar_t>(params, image, level.first + begin + i, (begin + i) % level.nx,
                                      (begin + i) / level.nx, stride, sides);
  }
}

template <typename scalar_t, typename Params, typename ParallelFor>
void decode_boxes(const Params& params, const ParallelFor& parallel_for) {
  const V8Heads& heads = params.heads;
  std::vector<int64_t> first(heads.num_levels + 1, 0);  // first block of each level, in one image
  for (int i = 0; i < heads.num_levels; ++i) {
    first[i + 1] = first[i] + (heads.levels[i].ny * heads.levels[i].nx + kBlock - 1) / kBlock;
  }
  const int64_t blocks = first.back();
  std::vector<char> reached(heads.bs * blocks, 0);
  for (int64_t t = 0; t < params.scratch.first_target[heads.bs]; ++t) {
    const V8Target& target = params.scratch.targets[t];
    for (int i = 0; i < heads.num_levels; ++i) {
      const V8Level& level = heads.levels[i];
      const V8Range range = v8_range(target, level.stride, level.nx, level.ny);
      char* of_level = reached.data() + target.image * blocks + first[i];
      for (int64_t y = range.y0; y < range.y1 && range.x0 < range.x1; ++y) {
        const int64_t row = y * level.nx;
        for (int64_t k = (row + range.x0) / kBlock; k <= (row + range.x1 - 1) / kBlock; ++k) of_level[k] = 1;
      }
    }
  }
  parallel_for(0, heads.bs * blocks, 8, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (!reached[k]) continue;
      const int64_t block = k % blocks;
      int level = 0;
      while (block >= first[level + 1]) ++level;
      decode_block<scalar_t>(params, k / blocks, level, (block - first[level]) * kBlock);
    }
  });
}

// Set `keys` to the `count` greatest keys above 0 of the anchors inside a target, in descending order.
template <typename Params, typename Key>
void best_keys(const Params& params, const V8Target& target, int64_t count, std::vector<uint64_t>& keys,
               const Key& key_of) {
  keys.clear();
  for (int which = 0; which < params.heads.num_levels; ++which) {
    const V8Level& level = params.heads.levels[which];
    const V8Range range = v8_range(target, level.stride, level.nx, level.ny);
    for (int64_t y = range.y0; y < range.y1; ++y) {
      for (int64_t x = range.x0; x < range.x1; ++x) {
        const V8Anchor at{which, y * level.nx + x, x, y};
        if (!v8_anchor_inside(params, target, at)) continue;
        if (const uint64_t key = key_of(at); key != 0) keys.push_back(key);
      }
    }
  }
  count = std::min<int64_t>(count, static_cast<int64_t>(keys.size()));
  std::partial_sort(keys.begin(), keys.begin() + count, keys.end(), std::greater<>());
  keys.resize(count);
}

// Find a target's best topk anchors. If fewer fit, fill up with the image's first anchors that lie inside, with weight
// 0, as a top-k over all anchors does that breaks ties by index.
template <typename scalar_t, typename Params, typename ParallelFor>
void assign(const Params& params, const ParallelFor& parallel_for) {
  const V8Heads& heads = params.heads;
  std::fill_n(params.slots.anchor, params.n * params.topk, int64_t{-1});
  parallel_for(0, params.scratch.first_target[heads.bs], 1, [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> keys;
    for (int64_t t = begin; t < end; ++t) {
      const V8Target& target = params.scratch.targets[t];
      const auto key_of = [&](const V8Anchor& at) { return v8_anchor_key<scalar_t>(params, target, at); };
      best_keys(params, target, params.topk, keys, key_of);
      int64_t* anchors = params.slots.anchor + t * params.topk;
      auto place = static_cast<int64_t>(keys.size());
      for (int64_t i = 0; i < place; ++i) anchors[i] = target.image * heads.anchors + v8_key_index(keys[i]);
      for (int64_t anchor = 0; anchor < heads.anchors && place < params.topk; ++anchor) {
        const V8Anchor at = v8_anchor(heads, anchor);
        const bool inside = v8_anchor_inside(params, target, at);
        if (inside && key_of(at) != 0) continue;
        if (inside) anchors[place] = target.image * heads.anchors + anchor;
        ++place;
      }
    }
  });
}

// Let the greatest slot that names an anchor represent it, and give the anchor to the target that it fits best. If it
// fits none, give it to the image's first with weight 0, for losses that count all assigned anchors.
template <typename scalar_t, typename Params, typename ParallelFor>
void resolve(const Params& params, const ParallelFor& parallel_for) {
  const V8Heads& heads = params.heads;
  const V8Scratch& scratch = params.scratch;
  const int64_t slots = params.n * params.topk;
  int64_t* anchors = params.slots.anchor;
  std::fill_n(scratch.owner, heads.bs * heads.anchors, uint32_t{0});
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (anchors[slot] < 0) continue;
    uint32_t& owner = scratch.owner[anchors[slot]];
    owner = owner == 0 ? static_cast<uint32_t>(slot + 1) : static_cast<uint32_t>(slot + 1) | kV8Shared;
  }
  parallel_for(0, slots, kSlotGrain, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t anchor = anchors[slot];
      if (anchor < 0) continue;
      const uint32_t owner = scratch.owner[anchor];
      if ((owner & ~kV8Shared) != slot + 1) {
        anchors[slot] = -1;
        continue;
      }
      const bool shared = (owner & kV8Shared) != 0;
      v8_settle<scalar_t>(params, slot, shared, shared ? v8_best_target<scalar_t>(params, anchor, 0, 1) : 0);
    }
  });
}

// Keep the topk2 best anchors that a target got, as a top-k over all anchors does that breaks ties by index: an anchor
// without alignment stays only if the list extends to its index. Then find each target's best alignment and overlap.
template <typename T>
void filter(const V8LossParams& params) {
  const V8Scratch& scratch = params.scratch;
  const auto* alignment = static_cast<const T*>(scratch.alignment);
  const auto* overlap = static_cast<const T*>(scratch.overlap);
  const int64_t slots = params.n * params.topk;
  int64_t* anchors = params.slots.anchor;
  if (params.topk2 != params.topk) {
    std::vector<std::vector<std::pair<uint64_t, int64_t>>> of_target(params.n);
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (anchors[slot] < 0) continue;
      of_target[scratch.winner[slot]].emplace_back(v8_key(alignment[slot], anchors[slot] % params.heads.anchors), slot);
    }
    for (auto& got : of_target) {
      std::sort(got.begin(), got.end(), std::greater<>());
      for (size_t i = got.size(); i-- > 0;) {
        const int64_t index = anchors[got[i].second] % params.heads.anchors;
        const auto behind = [&](const auto& other) { return other.first != 0 && v8_key_index(other.first) > index; };
        const int64_t rank =
            got[i].first != 0 ? static_cast<int64_t>(i) : index + std::count_if(got.begin(), got.end(), behind);
        if (rank >= params.topk2) anchors[got[i].second] = -1;
      }
    }
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (anchors[slot] < 0) continue;
    uint64_t* best = scratch.best + 2 * scratch.winner[slot];
    best[0] = std::max(best[0], v8_order(alignment[slot]));
    best[1] = std::max(best[1], v8_order(overlap[slot]));
  }
}

// Set slots and scratch except rows and scores. `count` is the number of valid rows of targets, all checked.
template <typename scalar_t, typename Params, typename ParallelFor>
void assign_all(const Params& params, int64_t count, const ParallelFor& parallel_for) {
  prepare_targets(params, count);
  decode_boxes<scalar_t>(params, parallel_for);
  assign<scalar_t>(params, parallel_for);
  resolve<scalar_t>(params, parallel_for);
  filter<arithmetic_t<scalar_t>>(params);
}

}  // namespace torch_fastdet::core::v8_loops
