// Compute the second half of the v8 losses on the CPU: terms, sums in a fixed order, gradients.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/v8_loss/v8_assign_loops.h"

namespace torch_fastdet::core::v8_loops {

struct Sums {
  double scores = 0, box = 0, cls = 0, distance = 0;
};

// Sum the terms of the anchors in slots, and store their rows and scores.
template <typename scalar_t, typename ParallelFor>
Sums slot_sums(const V8LossParams& params, const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const V8Scratch& scratch = params.scratch;
  const int64_t slots = params.n * params.topk;
  auto* scores = static_cast<T*>(params.slots.score);
  std::fill_n(params.slots.row, slots, int64_t{-1});
  std::fill_n(scores, slots, T(0));
  std::vector<Sums> terms(slots);
  parallel_for(0, slots, kSlotGrain, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t anchor = params.slots.anchor[slot];
      if (anchor < 0) continue;
      const int64_t image = anchor / heads.anchors;
      const V8Anchor at = v8_anchor(heads, anchor % heads.anchors);
      const int32_t winner = scratch.winner[slot];
      const V8Target& target = scratch.targets[winner];
      const T score = v8_score(static_cast<const T*>(scratch.alignment)[slot], scratch.best[2 * winner],
                               scratch.best[2 * winner + 1], static_cast<T>(params.settings[kV8Eps]));
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

// A run of class logits is a plane if the tensor lies in planes, else the logits of one anchor. Call run(tensor, image,
// channel, anchor, count, step) for `count` logits from there on, `step` elements apart.
inline int64_t runs_of(const V8Tensor& tensor, int64_t bs) {
  if (tensor.channels == tensor.box_channels) return 0;
  return tensor.layout == V8Layout::kPlanes ? bs * (tensor.channels - tensor.box_channels) : bs * tensor.anchors;
}

struct Run {
  int64_t image, anchor;
  int channel;
  int64_t count;
};

inline Run run_at(const V8Tensor& tensor, int64_t index) {
  if (tensor.layout == V8Layout::kRows) {
    return {index / tensor.anchors, index % tensor.anchors, tensor.box_channels, tensor.channels - tensor.box_channels};
  }
  const int classes = tensor.channels - tensor.box_channels;
  return {index / classes, 0, tensor.box_channels + static_cast<int>(index % classes), tensor.anchors};
}

inline int64_t logit_in_run(const V8Tensor& tensor, const Run& run, int64_t i) {
  const bool rows = tensor.layout == V8Layout::kRows;
  return v8_logit(tensor, run.image, run.anchor + (rows ? 0 : i)) + (run.channel + (rows ? i : 0)) * tensor.stride_c;
}

// Load a block of a run's logits, kBlock at a time. `buffer` is only used if they are not contiguous values of T.
template <typename scalar_t, typename T>
const T* load_block(const V8Tensor& tensor, const Run& run, int64_t begin, Block<T>& buffer) {
  const auto* logits = static_cast<const scalar_t*>(tensor.logits);
  const auto count = static_cast<int>(std::min<int64_t>(kBlock, run.count - begin));
  if (tensor.dense) {
    const scalar_t* at = logits + logit_in_run(tensor, run, begin);
    if constexpr (std::is_same_v<scalar_t, T>) {
      if (count == kBlock) return at;
    }
    for (int i = 0; i < count; ++i) buffer[i] = to_arithmetic(at[i]);
  } else {
    for (int i = 0; i < count; ++i) buffer[i] = to_arithmetic(logits[logit_in_run(tensor, run, begin + i)]);
  }
  return buffer;
}

template <typename scalar_t, typename ParallelFor>
double class_sum(const V8LossParams& params, const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  double total = 0;
  for (int t = 0; t < heads.num_tensors; ++t) {
    const V8Tensor& tensor = heads.tensors[t];
    const bool rows = tensor.layout == V8Layout::kRows;
    std::vector<double> partials(runs_of(tensor, heads.bs));
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, rows ? tensor.channels : tensor.anchors));
    parallel_for(0, static_cast<int64_t>(partials.size()), grain, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const Run run = run_at(tensor, index);
        double sum = 0;
        Block<T> sums = {}, buffer = {};
        int64_t i = 0;
        for (; i + kBlock <= run.count && !(rows && params.class_weights); i += kBlock) {
          const T* values = load_block<scalar_t>(tensor, run, i, buffer);
          vectorised([&] {
            for (int k = 0; k < kBlock; ++k) sums[k] += v8_softplus(values[k]);
          });
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

template <typename scalar_t, typename ParallelFor>
void add_up(const V8LossParams& params, const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  const Sums sums = slot_sums<scalar_t>(params, parallel_for);
  const double raw[3] = {sums.box, sums.cls + class_sum<scalar_t>(params, parallel_for), sums.distance};
  v8_finish<T>(params, sums.scores, raw);
}

// `count` is the number of valid rows of targets, all checked. `Params` is V8LossParams or V8PosedLossParams.
template <typename scalar_t, typename Params, typename ParallelFor>
void forward(const Params& params, int64_t count, const ParallelFor& parallel_for) {
  assign_all<scalar_t>(params, count, parallel_for);
  add_up<scalar_t>(params, parallel_for);
}

// Set gradients as if there were no targets: zeros for the boxes, sigmoids for the classes.
template <typename scalar_t, typename ParallelFor>
void dense_gradients(const V8LossBackwardParams& params, arithmetic_t<scalar_t> scale,
                     const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  for (int t = 0; t < heads.num_tensors; ++t) {
    const V8Tensor& tensor = heads.tensors[t];
    const bool rows = tensor.layout == V8Layout::kRows;
    auto* gradient = static_cast<scalar_t*>(tensor.gradient);
    const int64_t pieces = rows ? heads.bs * tensor.anchors : heads.bs;
    const int64_t zeros = rows ? tensor.box_channels : tensor.box_channels * tensor.anchors;
    const int64_t elements = rows ? tensor.channels : tensor.channels * tensor.anchors;
    parallel_for(0, zeros ? pieces : 0, std::max<int64_t>(1, 32768 / elements), [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece)
        std::fill_n(gradient + piece * elements, zeros, from_arithmetic<scalar_t>(0));
    });
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, rows ? tensor.channels : tensor.anchors));
    parallel_for(0, runs_of(tensor, heads.bs), grain, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        const Run run = run_at(tensor, index);
        scalar_t* out = gradient + v8_gradient(tensor, run.image, run.channel, run.anchor);
        const T plane = rows ? scale : scale * class_weight<T>(params.class_weights, run.channel - tensor.box_channels);
        Block<T> buffer = {}, values;
        for (int64_t i = 0; i < run.count; i += kBlock) {
          const auto count = static_cast<int>(std::min<int64_t>(kBlock, run.count - i));
          const T* logits = load_block<scalar_t>(tensor, run, i, buffer);
          vectorised([&values, logits, plane] {
            for (int k = 0; k < kBlock; ++k) values[k] = sigmoid(logits[k]) * plane;
          });
          for (int k = 0; k < count; ++k) {
            const T weight = rows ? class_weight<T>(params.class_weights, static_cast<int>(i) + k) : T(1);
            out[i + k] = from_arithmetic<scalar_t>(values[k] * weight);
          }
        }
      }
    });
  }
}

template <typename scalar_t, typename ParallelFor>
void backward(const V8LossBackwardParams& params, const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  T scales[3];
  for (int part = 0; part < 3; ++part) {
    scales[part] = static_cast<const T*>(params.grad_loss)[part * params.grad_stride] *
                   static_cast<const T*>(params.slots.scales)[part];
  }
  dense_gradients<scalar_t>(params, scales[1], parallel_for);
  parallel_for(0, params.n * params.topk, kSlotGrain, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t anchor = params.slots.anchor[slot];
      if (anchor < 0) continue;
      const int64_t image = anchor / heads.anchors;
      const V8Anchor at = v8_anchor(heads, anchor % heads.anchors);
      V8Target target;
      v8_target(params.targets + 6 * params.slots.row[slot], heads.image_w, heads.image_h, {}, heads.nc, target);
      const T score = static_cast<const T*>(params.slots.score)[slot];
      const V8Pair<T> pair = v8_pair(target, at.column, at.row, T(heads.levels[at.level].stride));
      T distance[4], by_distance[4];
      V8Side<T> sides[4];
      for (int side = 0; side < 4; ++side) {
        sides[side] = v8_side<T>(heads.reg_max, side_logits<scalar_t>(heads, image, at, side));
        distance[side] = sides[side].distance;
      }
      v8_box_term(pair, distance, by_distance);
      for (int side = 0; side < 4; ++side) {
        v8_write_side<scalar_t>(heads, image, at, side, sides[side], v8_wanted_distance(pair, side),
                                by_distance[side] * (score * scales[0]), score * scales[2]);
      }
      v8_write_class<scalar_t>(params, image, at, target.label, score, scales[1]);
    }
  });
}

}  // namespace torch_fastdet::core::v8_loops
