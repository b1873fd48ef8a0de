// CPU kernels of the v8 detection loss: anchors, targets and slots in parallel, sums in a fixed order.
// Lets g++ turn selects into vector blends; results stay IEEE. Before any include, because g++ does not inline between
// functions of differing options.
#pragma GCC optimize("no-trapping-math")

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

#include "ops/common/dispatch.h"
#include "ops/v8_loss/run.h"

namespace torch_fastdet::v8_loss_cpu {
namespace {

using namespace core;

constexpr int kBlock = 64;     // anchors or logits that are gathered side by side for vector instructions
constexpr int kMostBins = 64;  // in such a block; heads have 16
constexpr int64_t kSlotGrain = 64;

// ---- Loops over a block, with a second copy for AVX2 ---------------------------------------------------------------

template <typename T>
using Block = T[kBlock];

// sums[i] += softplus(logits[i]).
template <typename T>
inline void softplus_loop(const T* logits, Block<T>& sums) {
  for (int i = 0; i < kBlock; ++i) sums[i] += v8_softplus(logits[i]);
}

template <typename T>
inline void sigmoid_loop(const T* logits, T scale, Block<T>& out) {
  for (int i = 0; i < kBlock; ++i) out[i] = sigmoid(logits[i]) * scale;
}

// The distance of one side for the anchors of a block.
template <typename T>
inline void expectation_loop(int reg_max, const Block<T>* bins, Block<T>& distance) {
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

#ifdef TORCH_FASTDET_AVX2
TORCH_FASTDET_AVX2 __attribute__((flatten)) void softplus_loop_avx2(const float* logits, Block<float>& sums) {
  softplus_loop(logits, sums);
}
TORCH_FASTDET_AVX2 __attribute__((flatten)) void sigmoid_loop_avx2(const float* logits, float scale,
                                                                   Block<float>& out) {
  sigmoid_loop(logits, scale, out);
}
TORCH_FASTDET_AVX2 __attribute__((flatten)) void expectation_loop_avx2(int reg_max, const Block<float>* bins,
                                                                       Block<float>& distance) {
  expectation_loop(reg_max, bins, distance);
}
#endif

template <typename T>
void softplus_block(const T* logits, Block<T>& sums) {
#ifdef TORCH_FASTDET_AVX2
  if constexpr (std::is_same_v<T, float>) {
    if (has_avx2()) return softplus_loop_avx2(logits, sums);
  }
#endif
  softplus_loop(logits, sums);
}

template <typename T>
void sigmoid_block(const T* logits, T scale, Block<T>& out) {
#ifdef TORCH_FASTDET_AVX2
  if constexpr (std::is_same_v<T, float>) {
    if (has_avx2()) return sigmoid_loop_avx2(logits, scale, out);
  }
#endif
  sigmoid_loop(logits, scale, out);
}

template <typename T>
void expectation_block(int reg_max, const Block<T>* bins, Block<T>& distance) {
#ifdef TORCH_FASTDET_AVX2
  if constexpr (std::is_same_v<T, float>) {
    if (has_avx2()) return expectation_loop_avx2(reg_max, bins, distance);
  }
#endif
  expectation_loop(reg_max, bins, distance);
}

// ---- Targets -------------------------------------------------------------------------------------------------------

int64_t targets_in_use(const V8LossParams& params) {
  if (!params.num_targets) return params.n;
  TORCH_CHECK_VALUE(*params.num_targets >= 0 && *params.num_targets <= params.n, "v8_loss: num_targets is ",
                    *params.num_targets, ", but targets has ", params.n, " rows");
  return *params.num_targets;
}

void check_rows(const V8LossParams& params, int64_t count) {
  static constexpr const char* kWanted[] = {"an image index of the batch", "a class index below the number of classes"};
  static constexpr const char* kColumns[] = {"image", "class"};
  for (int64_t i = 0; i < count; ++i) {
    const float* row = params.targets + 6 * i;
    const int fault = v8_target_fault(row, params.heads.bs, params.heads.nc);
    TORCH_CHECK_VALUE(fault == 0, "v8_loss: targets row ", i, ", column ", fault - 1, " (", kColumns[fault - 1],
                      ") is ", row[fault - 1], ", but ", kWanted[fault - 1], " is expected (batch ", params.heads.bs,
                      ", ", params.heads.nc, " classes)");
  }
}

// Targets by image, in the order of their rows.
void prepare_targets(const V8LossParams& params) {
  const V8Heads& heads = params.heads;
  const int64_t count = targets_in_use(params);
  check_rows(params, count);
  std::fill_n(params.status, kV8StatusSize, int64_t{0});
  std::fill_n(params.scratch.best, 2 * params.n, uint64_t{0});
  const V8Sides sides = v8_sides(params.settings);
  std::vector<V8Target> kept;
  for (int64_t i = 0; i < count; ++i) {
    V8Target target;
    if (!v8_target(params.targets + 6 * i, heads.image_w, heads.image_h, sides, heads.nc, target)) continue;
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

// ---- Boxes ---------------------------------------------------------------------------------------------------------

template <typename scalar_t>
auto side_logits(const V8Heads& heads, int64_t b, const V8Anchor& at, int side) {
  using T = at::opmath_type<scalar_t>;
  const V8Level& level = heads.levels[at.level];
  const V8Tensor& tensor = heads.tensors[level.boxes];
  const auto* logits = static_cast<const scalar_t*>(tensor.logits) +
                       v8_logit(tensor, b, level.first_in_tensor + at.index) + side * heads.reg_max * tensor.stride_c;
  return [logits, step = tensor.stride_c](int i) { return static_cast<T>(logits[i * step]); };
}

template <typename scalar_t>
at::opmath_type<scalar_t> class_logit(const V8Heads& heads, int64_t b, const V8Anchor& at, int label) {
  const V8Level& level = heads.levels[at.level];
  const V8Tensor& tensor = heads.tensors[level.classes];
  return static_cast<at::opmath_type<scalar_t>>(
      static_cast<const scalar_t*>(tensor.logits)[v8_logit(tensor, b, level.first_in_tensor + at.index) +
                                                  (tensor.box_channels + label) * tensor.stride_c]);
}

template <typename scalar_t>
void decode_block(const V8LossParams& params, int64_t image, int which, int64_t begin) {
  using T = at::opmath_type<scalar_t>;
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
      for (int i = 0; i < count; ++i) bins[bin][i] = static_cast<T>(at[offsets[i]]);
    }
    expectation_block(heads.reg_max, bins, distance[side]);
  }
  auto* boxes = static_cast<CornerBox<T>*>(params.scratch.boxes) + image * heads.anchors + level.first + begin;
  const T stride = level.stride;
  for (int i = 0; i < count; ++i) {
    const T x = T((begin + i) % level.nx) + T(0.5), y = T((begin + i) / level.nx) + T(0.5);
    boxes[i] = {(x - distance[0][i]) * stride, (y - distance[1][i]) * stride, (x + distance[2][i]) * stride,
                (y + distance[3][i]) * stride};
  }
}

// Decodes the blocks of anchors that some target reaches.
template <typename scalar_t>
void decode_boxes(const V8LossParams& params) {
  const V8Heads& heads = params.heads;
  std::vector<int64_t> first(heads.num_levels + 1, 0);  // block of each level, in one image
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
  at::parallel_for(0, heads.bs * blocks, 8, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      if (!reached[k]) continue;
      const int64_t block = k % blocks;
      int level = 0;
      while (block >= first[level + 1]) ++level;
      decode_block<scalar_t>(params, k / blocks, level, (block - first[level]) * kBlock);
    }
  });
}

// ---- Assignment ----------------------------------------------------------------------------------------------------

template <typename T>
struct Assignment {
  T alpha, beta, eps;
  explicit Assignment(const double* settings)
      : alpha(static_cast<T>(settings[kV8Alpha])),
        beta(static_cast<T>(settings[kV8Beta])),
        eps(static_cast<T>(settings[kV8Eps])) {}
};

template <typename scalar_t>
uint64_t anchor_key(const V8LossParams& params, const Assignment<at::opmath_type<scalar_t>>& settings,
                    const V8Target& target, const V8Anchor& at) {
  using T = at::opmath_type<scalar_t>;
  const V8Heads& heads = params.heads;
  const int64_t anchor = heads.levels[at.level].first + at.index;
  const T overlap =
      v8_overlap(target, static_cast<const CornerBox<T>*>(params.scratch.boxes)[target.image * heads.anchors + anchor]);
  if (overlap == T(0) && settings.beta > T(0)) return 0;
  const T logit = class_logit<scalar_t>(heads, target.image, at, target.lookup);
  return v8_key(v8_alignment(logit, overlap, settings.alpha, settings.beta), anchor);
}

bool is_inside(const V8Heads& heads, const V8Target& target, const V8Anchor& at) {
  const float stride = heads.levels[at.level].stride;
  return v8_inside(target, v8_center(at.column, stride), v8_center(at.row, stride));
}

// The best topk anchors of each target, in its slots. Where fewer fit, the first anchors of the image that do not fit
// are named too, if they lie inside of the target, as a top-k over all anchors does whose ties go by index. They have
// no weight, but others may want them.
template <typename scalar_t>
void assign(const V8LossParams& params) {
  using T = at::opmath_type<scalar_t>;
  const V8Heads& heads = params.heads;
  const Assignment<T> settings(params.settings);
  std::fill_n(params.slots.anchor, params.n * params.topk, int64_t{-1});
  at::parallel_for(0, params.scratch.first_target[heads.bs], 1, [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> keys;
    for (int64_t t = begin; t < end; ++t) {
      const V8Target& target = params.scratch.targets[t];
      keys.clear();
      for (int which = 0; which < heads.num_levels; ++which) {
        const V8Level& level = heads.levels[which];
        const V8Range range = v8_range(target, level.stride, level.nx, level.ny);
        for (int64_t y = range.y0; y < range.y1; ++y) {
          for (int64_t x = range.x0; x < range.x1; ++x) {
            const V8Anchor at{which, y * level.nx + x, x, y};
            if (!is_inside(heads, target, at)) continue;
            const uint64_t key = anchor_key<scalar_t>(params, settings, target, at);
            if (key != 0) keys.push_back(key);
          }
        }
      }
      int64_t* anchors = params.slots.anchor + t * params.topk;
      const auto count = std::min<int64_t>(params.topk, static_cast<int64_t>(keys.size()));
      std::partial_sort(keys.begin(), keys.begin() + count, keys.end(), std::greater<>());
      for (int64_t i = 0; i < count; ++i) anchors[i] = target.image * heads.anchors + v8_key_index(keys[i]);
      int64_t place = count;
      for (int64_t anchor = 0; anchor < heads.anchors && place < params.topk; ++anchor) {
        const V8Anchor at = v8_anchor(heads, anchor);
        const bool inside = is_inside(heads, target, at);
        if (inside && anchor_key<scalar_t>(params, settings, target, at) != 0) continue;
        if (inside) anchors[place] = target.image * heads.anchors + anchor;
        ++place;
      }
    }
  });
}

// Of the slots that name one anchor the greatest stands for it; the anchor goes to the target that it fits best.
template <typename scalar_t>
void resolve(const V8LossParams& params) {
  using T = at::opmath_type<scalar_t>;
  const V8Heads& heads = params.heads;
  const V8Scratch& scratch = params.scratch;
  const Assignment<T> settings(params.settings);
  const int64_t slots = params.n * params.topk;
  int64_t* anchors = params.slots.anchor;
  std::fill_n(scratch.owner, heads.bs * heads.anchors, uint32_t{0});
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (anchors[slot] < 0) continue;
    uint32_t& owner = scratch.owner[anchors[slot]];
    owner = owner == 0 ? static_cast<uint32_t>(slot + 1) : static_cast<uint32_t>(slot + 1) | kV8Shared;
  }
  at::parallel_for(0, slots, kSlotGrain, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t anchor = anchors[slot];
      if (anchor < 0) continue;
      const uint32_t owner = scratch.owner[anchor];
      if ((owner & ~kV8Shared) != slot + 1) {
        anchors[slot] = -1;
        continue;
      }
      const int64_t image = anchor / heads.anchors;
      const V8Anchor at = v8_anchor(heads, anchor % heads.anchors);
      const CornerBox<T> box = static_cast<const CornerBox<T>*>(scratch.boxes)[anchor];
      int64_t winner = slot / params.topk;
      if (owner & kV8Shared) {
        const float stride = heads.levels[at.level].stride;
        const float x = v8_center(at.column, stride), y = v8_center(at.row, stride);
        uint64_t best = 0;
        for (int64_t t = scratch.first_target[image]; t < scratch.first_target[image + 1]; ++t) {
          if (!v8_inside(scratch.targets[t], x, y)) continue;
          best = std::max(best, v8_key(v8_overlap(scratch.targets[t], box), t));
        }
        if (best != 0) winner = v8_key_index(best);
      }
      const V8Target& target = scratch.targets[winner];
      const T overlap = v8_overlap(target, box);
      const T logit = class_logit<scalar_t>(heads, image, at, target.lookup);
      scratch.winner[slot] = static_cast<int32_t>(winner);
      static_cast<T*>(scratch.overlap)[slot] = overlap;
      static_cast<T*>(scratch.alignment)[slot] = v8_alignment(logit, overlap, settings.alpha, settings.beta);
    }
  });
}

// Of the anchors that a target got, its topk2 best are kept; then the best alignment and overlap of each target.
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
      const uint64_t key = v8_key(alignment[slot], anchors[slot] % params.heads.anchors);
      if (key == 0) {
        anchors[slot] = -1;
      } else {
        of_target[scratch.winner[slot]].emplace_back(key, slot);
      }
    }
    for (auto& got : of_target) {
      std::sort(got.begin(), got.end(), std::greater<>());
      for (size_t i = params.topk2; i < got.size(); ++i) anchors[got[i].second] = -1;
    }
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (anchors[slot] < 0) continue;
    uint64_t* best = scratch.best + 2 * scratch.winner[slot];
    best[0] = std::max(best[0], v8_order(alignment[slot]));
    best[1] = std::max(best[1], v8_order(overlap[slot]));
  }
}

// ---- Sums ----------------------------------------------------------------------------------------------------------

template <typename T>
T class_weight(const void* weights, int label) {
  return weights ? static_cast<const T*>(weights)[label] : T(1);
}

template <typename T>
T cell_share(const V8Heads& heads, const V8Anchor& at, int side) {
  return T(heads.levels[at.level].stride) / T(side % 2 == 0 ? heads.image_w : heads.image_h);
}

struct Sums {
  double scores = 0, box = 0, cls = 0, distance = 0;
};

// The terms of the anchors in slots; leaves their rows and scores.
template <typename scalar_t>
Sums slot_sums(const V8LossParams& params) {
  using T = at::opmath_type<scalar_t>;
  const V8Heads& heads = params.heads;
  const V8Scratch& scratch = params.scratch;
  const Assignment<T> settings(params.settings);
  const int64_t slots = params.n * params.topk;
  auto* scores = static_cast<T*>(params.slots.score);
  std::fill_n(params.slots.row, slots, int64_t{-1});
  std::fill_n(scores, slots, T(0));
  std::vector<Sums> terms(slots);
  at::parallel_for(0, slots, kSlotGrain, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t anchor = params.slots.anchor[slot];
      if (anchor < 0) continue;
      const int64_t image = anchor / heads.anchors;
      const V8Anchor at = v8_anchor(heads, anchor % heads.anchors);
      const int32_t winner = scratch.winner[slot];
      const V8Target& target = scratch.targets[winner];
      const T score = v8_score(static_cast<const T*>(scratch.alignment)[slot], scratch.best[2 * winner],
                               scratch.best[2 * winner + 1], settings.eps);
      const V8Pair<T> pair = v8_pair(target, at.column, at.row, T(heads.levels[at.level].stride));
      T distance[4], gradient[4], distance_sum = 0;
      for (int side = 0; side < 4; ++side) {
        const auto logits = side_logits<scalar_t>(heads, image, at, side);
        const V8Side<T> predicted = v8_side<T>(heads.reg_max, logits);
        distance[side] = predicted.distance;
        distance_sum += v8_distance_term(predicted, v8_wanted_distance(pair, side), cell_share<T>(heads, at, side),
                                         heads.reg_max, logits);
      }
      const T logit = class_logit<scalar_t>(heads, image, at, target.label);
      params.slots.row[slot] = target.row;
      scores[slot] = score;
      terms[slot] = {score, score * (T(1) - v8_box_term(pair, distance, gradient)),
                     -score * class_weight<T>(params.class_weights, target.label) * logit, score * distance_sum};
    }
  });
  Sums sums;
  for (const Sums& term : terms) {
    sums.scores += term.scores;
    sums.box += term.box;
    sums.cls += term.cls;
    sums.distance += term.distance;
  }
  return sums;
}

// Runs of class logits: where a tensor lies in planes, a plane; in rows, those of one anchor. Calls
// run(tensor, image, channel, anchor, count, step): `count` logits from there on, `step` elements apart.
int64_t runs_of(const V8Tensor& tensor, int64_t bs) {
  if (tensor.channels == tensor.box_channels) return 0;
  return tensor.layout == V8Layout::kPlanes ? bs * (tensor.channels - tensor.box_channels) : bs * tensor.anchors;
}

struct Run {
  int64_t image, anchor;
  int channel;
  int64_t count;
};

Run run_at(const V8Tensor& tensor, int64_t index) {
  if (tensor.layout == V8Layout::kRows) {
    return {index / tensor.anchors, index % tensor.anchors, tensor.box_channels, tensor.channels - tensor.box_channels};
  }
  const int classes = tensor.channels - tensor.box_channels;
  return {index / classes, 0, tensor.box_channels + static_cast<int>(index % classes), tensor.anchors};
}

// Offset of element i of a run among the logits.
int64_t logit_in_run(const V8Tensor& tensor, const Run& run, int64_t i) {
  const bool rows = tensor.layout == V8Layout::kRows;
  return v8_logit(tensor, run.image, run.anchor + (rows ? 0 : i)) + (run.channel + (rows ? i : 0)) * tensor.stride_c;
}

// A block of a run's logits, kBlock at a time; `buffer` is used where they do not lie side by side in T.
template <typename scalar_t, typename T>
const T* load_block(const V8Tensor& tensor, const Run& run, int64_t begin, Block<T>& buffer) {
  const auto* logits = static_cast<const scalar_t*>(tensor.logits);
  const auto count = static_cast<int>(std::min<int64_t>(kBlock, run.count - begin));
  if (tensor.dense) {
    const scalar_t* at = logits + logit_in_run(tensor, run, begin);
    if constexpr (std::is_same_v<scalar_t, T>) {
      if (count == kBlock) return at;
    }
    for (int i = 0; i < count; ++i) buffer[i] = static_cast<T>(at[i]);
  } else {
    for (int i = 0; i < count; ++i) buffer[i] = static_cast<T>(logits[logit_in_run(tensor, run, begin + i)]);
  }
  return buffer;
}

// Sum of the class entropies if no class is to be found.
template <typename scalar_t>
double class_sum(const V8LossParams& params) {
  using T = at::opmath_type<scalar_t>;
  const V8Heads& heads = params.heads;
  double total = 0;
  for (int t = 0; t < heads.num_tensors; ++t) {
    const V8Tensor& tensor = heads.tensors[t];
    const bool rows = tensor.layout == V8Layout::kRows;
    std::vector<double> partials(runs_of(tensor, heads.bs));
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, rows ? tensor.channels : tensor.anchors));
    at::parallel_for(0, static_cast<int64_t>(partials.size()), grain, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const Run run = run_at(tensor, index);
        double sum = 0;
        Block<T> sums = {}, buffer = {};
        int64_t i = 0;
        for (; i + kBlock <= run.count && !(rows && params.class_weights); i += kBlock) {
          softplus_block(load_block<scalar_t>(tensor, run, i, buffer), sums);
        }
        for (; i < run.count; i += kBlock) {
          const auto count = static_cast<int>(std::min<int64_t>(kBlock, run.count - i));
          const T* values = load_block<scalar_t>(tensor, run, i, buffer);
          for (int k = 0; k < count; ++k) {
            const T weight = rows ? class_weight<T>(params.class_weights, static_cast<int>(i) + k) : T(1);
            sums[k] += weight * v8_softplus(values[k]);
          }
        }
        for (const T value : sums) sum += static_cast<double>(value);
        partials[index] =
            rows ? sum
                 : sum * static_cast<double>(class_weight<T>(params.class_weights, run.channel - tensor.box_channels));
      }
    });
    for (const double partial : partials) total += partial;
  }
  return total;
}

template <typename scalar_t>
void forward(const V8LossParams& params) {
  using T = at::opmath_type<scalar_t>;
  prepare_targets(params);
  decode_boxes<scalar_t>(params);
  assign<scalar_t>(params);
  resolve<scalar_t>(params);
  filter<T>(params);
  const Sums sums = slot_sums<scalar_t>(params);
  const double scores = sums.scores < 1 ? 1 : sums.scores;  // NaN stays
  const double raw[3] = {sums.box, sums.cls + class_sum<scalar_t>(params), sums.distance};
  const double all = static_cast<double>(params.heads.bs) * params.settings[kV8Weight];
  for (int part = 0; part < 3; ++part) {
    const double gain = params.settings[kV8Box + part] / scores;
    static_cast<T*>(params.items)[part] = static_cast<T>(raw[part] * gain);
    static_cast<T*>(params.loss)[part] = static_cast<T>(raw[part] * gain * all);
    static_cast<T*>(params.slots.scales)[part] = static_cast<T>(gain * all);
  }
}

// ---- Backward ------------------------------------------------------------------------------------------------------

// Gradients as if there were no targets: zeros for the boxes, sigmoids for the classes.
template <typename scalar_t>
void dense_gradients(const V8LossBackwardParams& params, at::opmath_type<scalar_t> scale) {
  using T = at::opmath_type<scalar_t>;
  const V8Heads& heads = params.heads;
  for (int t = 0; t < heads.num_tensors; ++t) {
    const V8Tensor& tensor = heads.tensors[t];
    const bool rows = tensor.layout == V8Layout::kRows;
    auto* gradient = static_cast<scalar_t*>(tensor.gradient);
    const int64_t pieces = rows ? heads.bs * tensor.anchors : heads.bs;
    const int64_t zeros = rows ? tensor.box_channels : tensor.box_channels * tensor.anchors;
    const int64_t elements = rows ? tensor.channels : tensor.channels * tensor.anchors;
    at::parallel_for(0, zeros ? pieces : 0, std::max<int64_t>(1, 32768 / elements), [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) std::fill_n(gradient + piece * elements, zeros, scalar_t(0));
    });
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, rows ? tensor.channels : tensor.anchors));
    at::parallel_for(0, runs_of(tensor, heads.bs), grain, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const Run run = run_at(tensor, index);
        scalar_t* out = gradient + v8_gradient(tensor, run.image, run.channel, run.anchor);
        const T plane = rows ? scale : scale * class_weight<T>(params.class_weights, run.channel - tensor.box_channels);
        Block<T> buffer = {}, values;
        for (int64_t i = 0; i < run.count; i += kBlock) {
          const auto count = static_cast<int>(std::min<int64_t>(kBlock, run.count - i));
          sigmoid_block(load_block<scalar_t>(tensor, run, i, buffer), plane, values);
          for (int k = 0; k < count; ++k) {
            const T weight = rows ? class_weight<T>(params.class_weights, static_cast<int>(i) + k) : T(1);
            out[i + k] = static_cast<scalar_t>(values[k] * weight);
          }
        }
      }
    });
  }
}

template <typename scalar_t>
void backward(const V8LossBackwardParams& params) {
  using T = at::opmath_type<scalar_t>;
  const V8Heads& heads = params.heads;
  T scales[3];
  for (int part = 0; part < 3; ++part) {
    scales[part] = static_cast<const T*>(params.grad_loss)[part * params.grad_stride] *
                   static_cast<const T*>(params.slots.scales)[part];
  }
  dense_gradients<scalar_t>(params, scales[1]);
  at::parallel_for(0, params.n * params.topk, kSlotGrain, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t anchor = params.slots.anchor[slot];
      if (anchor < 0) continue;
      const int64_t image = anchor / heads.anchors;
      const V8Anchor at = v8_anchor(heads, anchor % heads.anchors);
      const V8Level& level = heads.levels[at.level];
      V8Target target;
      v8_target(params.targets + 6 * params.slots.row[slot], heads.image_w, heads.image_h, {}, heads.nc, target);
      const T score = static_cast<const T*>(params.slots.score)[slot];
      const V8Pair<T> pair = v8_pair(target, at.column, at.row, T(level.stride));
      T distance[4], by_distance[4];
      V8Side<T> sides[4];
      for (int side = 0; side < 4; ++side) {
        sides[side] = v8_side<T>(heads.reg_max, side_logits<scalar_t>(heads, image, at, side));
        distance[side] = sides[side].distance;
      }
      v8_box_term(pair, distance, by_distance);
      const V8Tensor& boxes = heads.tensors[level.boxes];
      const int64_t in_tensor = level.first_in_tensor + at.index, step = v8_gradient_step(boxes);
      for (int side = 0; side < 4; ++side) {
        const auto logits = side_logits<scalar_t>(heads, image, at, side);
        const T wanted = v8_wanted_distance(pair, side), share = cell_share<T>(heads, at, side);
        scalar_t* out =
            static_cast<scalar_t*>(boxes.gradient) + v8_gradient(boxes, image, side * heads.reg_max, in_tensor);
        for (int i = 0; i < heads.reg_max; ++i) {
          out[i * step] =
              static_cast<scalar_t>(v8_side_gradient(sides[side], wanted, share, heads.reg_max, logits, i,
                                                     by_distance[side] * (score * scales[0]), score * scales[2]));
        }
      }
      const V8Tensor& classes = heads.tensors[level.classes];
      const T logit = class_logit<scalar_t>(heads, image, at, target.label);
      static_cast<scalar_t*>(
          classes.gradient)[v8_gradient(classes, image, classes.box_channels + target.label, in_tensor)] =
          static_cast<scalar_t>((sigmoid(logit) - score) * scales[1] *
                                class_weight<T>(params.class_weights, target.label));
    }
  });
}

struct Cpu : OnDevice {
  static int64_t slot_blocks(const V8LossParams&) { return 0; }
  static int64_t class_blocks(const V8LossParams&) { return 0; }
  static void run(const V8LossParams& params) {
    with_dtype(params.heads.dtype, [&](auto zero) { forward<decltype(zero)>(params); });
  }
  static void run(const V8LossBackwardParams& params) {
    with_dtype(params.heads.dtype, [&](auto zero) { backward<decltype(zero)>(params); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_v8_loss<Cpu>(m);
}

}  // namespace torch_fastdet::v8_loss_cpu
