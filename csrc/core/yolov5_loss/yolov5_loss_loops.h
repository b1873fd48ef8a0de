// Compute the YOLOv5 loss on the CPU; parallel_for(begin, end, grain, f) shares candidates and cells.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/common/instruction_set.h"
#include "core/common/log_math.h"
#include "core/common/storage.h"
#include "core/yolov5_loss/yolov5_loss.h"

namespace torch_fastdet::core::yolov5_loops {
namespace {  // of each file that includes this, so that functions called once are inlined

constexpr int64_t kCellChunk = 4096;
constexpr int64_t kBlock = 1024;  // logits that are gathered for vector instructions

// Compute binary_cross_entropy without a focal factor for many logits.
template <typename T>
void entropy_loop(int64_t count, const T* logits, const T* targets, T positive_weight, T* values, T* gradients) {
  for (int64_t i = 0; i < count; ++i) {
    const T logit = logits[i], target = targets[i];
    const T decay = exp_rn(-std::fabs(logit));
    const T inverse = T(1) / (T(1) + decay);
    const T complement = logit >= 0 ? decay * inverse : inverse;
    const T weight = T(1) + (positive_weight - T(1)) * target;
    const T softplus = log1p_of_share(decay) + (logit < 0 ? -logit : T(0));
    values[i] = (T(1) - target) * logit + weight * softplus;
    gradients[i] = (T(1) - target) - weight * complement;
  }
}

// Sum its gradients for `matches` targets, of which positives[i] are `positive` and the others `negative`.
template <typename T>
void slope_loop(int64_t count, const T* logits, const T* positives, T matches, T positive, T negative,
                T positive_weight, T* slopes) {
  const T by_positive = T(1) + (positive_weight - T(1)) * positive;
  const T by_negative = T(1) + (positive_weight - T(1)) * negative;
  for (int64_t i = 0; i < count; ++i) {
    const T logit = logits[i];
    const T decay = exp_rn(-std::fabs(logit));
    const T inverse = T(1) / (T(1) + decay);
    const T complement = logit >= 0 ? decay * inverse : inverse;
    slopes[i] = positives[i] * ((T(1) - positive) - by_positive * complement) +
                (matches - positives[i]) * ((T(1) - negative) - by_negative * complement);
  }
}

template <typename T>
void entropies(int64_t count, const T* logits, const T* targets, T positive_weight, T gamma, T* values, T* gradients) {
  if (gamma > 0) {
    for (int64_t i = 0; i < count; ++i) {
      const auto entropy = binary_cross_entropy(logits[i], targets[i], positive_weight, gamma);
      values[i] = entropy.value;
      gradients[i] = entropy.gradient;
    }
    return;
  }
  vectorised([&] { entropy_loop(count, logits, targets, positive_weight, values, gradients); });
}

template <typename T>
void entropy_slopes(int64_t count, const T* logits, const T* positives, T matches, T positive, T negative,
                    T positive_weight, T gamma, T* slopes) {
  if (gamma > 0) {
    for (int64_t i = 0; i < count; ++i) {
      T sum = 0;
      if (positives[i] > 0) {
        sum += positives[i] * binary_cross_entropy(logits[i], positive, positive_weight, gamma).gradient;
      }
      if (positives[i] < matches) {
        sum += (matches - positives[i]) * binary_cross_entropy(logits[i], negative, positive_weight, gamma).gradient;
      }
      slopes[i] = sum;
    }
    return;
  }
  vectorised([&] { slope_loop(count, logits, positives, matches, positive, negative, positive_weight, slopes); });
}

// Hold one level of a forward pass: its part of the tensors, and the results of its matches.
template <typename scalar_t>
struct Level {
  using T = arithmetic_t<scalar_t>;
  const Yolov5LossParams& params;
  const int level;
  const int64_t targets;  // number of valid rows
  const int64_t slots = kYolov5CellOffsets * params.na * params.nt;
  const Yolov5Head& head = params.heads[level];
  const scalar_t* logits = static_cast<const scalar_t*>(head.logits);
  int64_t* match_cell = params.state.match_cell + level * slots;
  T* match_values = static_cast<T*>(params.state.match_values) + level * slots * 5;
  T* object_gradient = static_cast<T*>(params.state.object_gradient) + head.first_cell;
  uint64_t* owner = params.state.owner + head.first_cell;
  std::vector<T> ciou, class_terms;  // of each slot
  double box_sum = 0, class_sum = 0, object_mean = 0;
  int64_t matches = 0;

  Level(const Yolov5LossParams& params, int level, int64_t targets)
      : params(params), level(level), targets(targets), ciou(slots), class_terms(slots) {}

  template <typename ParallelFor>
  void match(const ParallelFor& parallel_for) {
    parallel_for(0, slots, 64, [&](int64_t begin, int64_t end) {
      std::vector<T> class_logits(params.nc), wanted(params.nc), values(params.nc), gradients(params.nc);
      for (int64_t slot = begin; slot < end; ++slot) {
        const int64_t target = slot % params.nt;
        const auto a = slot / params.nt % params.na;
        const auto offset = static_cast<int>(slot / params.nt / params.na);
        const float* row = params.targets + 6 * target;
        const float* anchor = params.anchors + (level * params.na + a) * 2;
        Yolov5Match match{};
        if (target < targets) match = yolov5_match(row + 2, anchor, head.nx, head.ny, params.anchor_t, offset);
        match_cell[slot] = -1;
        std::fill_n(match_values + 5 * slot, 5, T(0));
        if (!match.matched) continue;

        const int64_t cell = yolov5_cell_number(head, params.na, {static_cast<int64_t>(row[0]), a, match.y, match.x});
        const scalar_t* at = logits + yolov5_logits_offset(head, params.na, params.no, cell);
        T box_logits[4];
        for (int i = 0; i < 4; ++i) box_logits[i] = static_cast<T>(at[i * head.stride_o]);
        const Yolov5Box<T> box = yolov5_box(box_logits, match, anchor);
        match_cell[slot] = cell;
        ciou[slot] = box.ciou;
        match_values[5 * slot] = yolov5_objectness_target(box.ciou, T(params.gr));
        std::copy_n(box.gradient, 4, match_values + 5 * slot + 1);
        if (params.nc > 1) {
          for (int c = 0; c < params.nc; ++c) class_logits[c] = static_cast<T>(at[(5 + c) * head.stride_o]);
          std::fill(wanted.begin(), wanted.end(), T(params.negative));
          wanted[static_cast<int>(row[1])] = T(params.positive);
          entropies(params.nc, class_logits.data(), wanted.data(), T(params.cls_pw), T(params.fl_gamma), values.data(),
                    gradients.data());
          T sum = 0;
          for (const T value : values) sum += value;
          class_terms[slot] = sum;
        }
      }
    });
  }

  // In slot order, find the match that owns each cell, and sum over all matches.
  void add_matches() {
    std::fill_n(owner, head.cells, uint64_t{0});
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (match_cell[slot] < 0) continue;
      uint64_t& key = owner[match_cell[slot]];
      const uint64_t own = yolov5_key(params.sort_obj_iou, static_cast<float>(ciou[slot]), slot);
      key = key == 0 ? own : std::max(key & ~kYolov5Shared, own) | kYolov5Shared;
      box_sum += T(1) - ciou[slot];
      class_sum += class_terms[slot];
      ++matches;
    }
  }

  template <typename ParallelFor>
  void add_objectness(const ParallelFor& parallel_for) {
    std::vector<double> partials(ceil_div(head.cells, kCellChunk));
    parallel_for(0, static_cast<int64_t>(partials.size()), 1, [&](int64_t begin, int64_t end) {
      T cell_logits[kBlock], wanted[kBlock], values[kBlock];
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        T sum = 0;
        const int64_t last = std::min(head.cells, (chunk + 1) * kCellChunk);
        for (int64_t first = chunk * kCellChunk; first < last; first += kBlock) {
          const int64_t count = std::min(kBlock, last - first);
          for (int64_t i = 0; i < count; ++i) {
            const int64_t offset = yolov5_logits_offset(head, params.na, params.no, first + i);
            cell_logits[i] = static_cast<T>(logits[offset + 4 * head.stride_o]);
            const uint64_t key = owner[first + i];
            wanted[i] = key ? match_values[5 * yolov5_key_slot(key)] : T(0);
          }
          entropies(count, cell_logits, wanted, T(params.obj_pw), T(params.fl_gamma), values, object_gradient + first);
          for (int64_t i = 0; i < count; ++i) sum += values[i];
        }
        partials[chunk] = sum;
      }
    });
    for (const double partial : partials) object_mean += partial;
    object_mean /= static_cast<double>(head.cells);
  }
};

// `targets` is the number of valid rows, none of which has a fault (yolov5_target_fault).
template <typename scalar_t, typename ParallelFor>
void forward(const Yolov5LossParams& params, int64_t targets, const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  auto* loss = static_cast<T*>(params.loss);
  auto* items = static_cast<T*>(params.items);
  auto* levels = static_cast<T*>(params.state.levels);
  std::fill_n(params.status, kYolov5StatusSize, int64_t{0});
  const auto bs = static_cast<double>(params.bs);
  double box_loss = 0, object_loss = 0, class_loss = 0;

  for (int level = 0; level < params.nl; ++level) {
    Level<scalar_t> part(params, level, targets);
    part.match(parallel_for);
    part.add_matches();
    part.add_objectness(parallel_for);
    const auto matches = static_cast<double>(part.matches), cells = static_cast<double>(part.head.cells);
    const double box_scale = part.matches ? params.box / matches : 0;
    const double class_scale = part.matches && params.nc > 1 ? params.cls / (matches * params.nc) : 0;
    box_loss += box_scale * part.box_sum;
    class_loss += class_scale * part.class_sum;
    object_loss += params.obj * params.balance[level] * part.object_mean;
    levels[4 * level] = static_cast<T>(part.object_mean);
    levels[4 * level + 1] = static_cast<T>(bs * box_scale);
    levels[4 * level + 2] = static_cast<T>(bs * params.obj * params.balance[level] / cells);
    levels[4 * level + 3] = static_cast<T>(bs * class_scale);
  }
  items[0] = static_cast<T>(box_loss);
  items[1] = static_cast<T>(object_loss);
  items[2] = static_cast<T>(class_loss);
  loss[0] = static_cast<T>((box_loss + object_loss + class_loss) * bs);
}

template <typename scalar_t, typename ParallelFor>
void backward(const Yolov5LossBackwardParams& params, const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  const int64_t slots = kYolov5CellOffsets * params.na * params.nt;
  const T grad_loss = *static_cast<const T*>(params.grad_loss);

  for (int level = 0; level < params.nl; ++level) {
    const Yolov5Head& head = params.heads[level];
    const auto* logits = static_cast<const scalar_t*>(head.logits);
    auto* gradient = static_cast<scalar_t*>(head.gradient);
    const auto* match_cell = params.state.match_cell + level * slots;
    const auto* match_values = static_cast<const T*>(params.state.match_values) + level * slots * 5;
    const auto* object_slopes = static_cast<const T*>(params.state.object_gradient) + head.first_cell;
    const uint64_t* owner = params.state.owner + head.first_cell;
    const auto* scale = static_cast<const T*>(params.state.levels) + 4 * level + 1;
    const T box_scale = grad_loss * scale[0], object_scale = grad_loss * scale[1], class_scale = grad_loss * scale[2];
    const int64_t step = yolov5_gradient_step(head);
    const auto object_gradient = [&](int64_t cell) {
      return static_cast<scalar_t>(object_scale * object_slopes[cell]);
    };

    // Set the gradients of every cell to zero, except the objectness.
    if (step == 1) {
      parallel_for(0, head.cells, kCellChunk, [&](int64_t begin, int64_t end) {
        std::fill(gradient + begin * params.no, gradient + end * params.no, scalar_t(0));
        for (int64_t cell = begin; cell < end; ++cell) gradient[cell * params.no + 4] = object_gradient(cell);
      });
    } else {
      parallel_for(0, params.bs * params.na, 1, [&](int64_t begin, int64_t end) {
        std::fill(gradient + begin * params.no * step, gradient + end * params.no * step, scalar_t(0));
        for (int64_t cell = begin * step; cell < end * step; ++cell) {
          gradient[yolov5_gradient_offset(head, params.no, cell) + 4 * step] = object_gradient(cell);
        }
      });
    }

    // A matched cell's owner writes its gradients, adding its matches in the order of one anchor's slots.
    parallel_for(0, slots, 64, [&](int64_t begin, int64_t end) {
      std::vector<T> positives(params.nc), class_logits(params.nc), slopes(params.nc);
      for (int64_t slot = begin; slot < end; ++slot) {
        const int64_t cell = match_cell[slot];
        if (cell < 0 || yolov5_key_slot(owner[cell]) != slot) continue;
        T box[4] = {};
        T matches = 0;
        std::fill(positives.begin(), positives.end(), T(0));
        const auto add = [&](int64_t other) {
          for (int i = 0; i < 4; ++i) box[i] += match_values[5 * other + 1 + i];
          positives[static_cast<int>(params.targets[6 * (other % params.nt) + 1])] += 1;
          matches += 1;
        };
        if (owner[cell] & kYolov5Shared) {
          const int64_t first = slot / params.nt % params.na * params.nt;
          for (int offset = 0; offset < kYolov5CellOffsets; ++offset) {
            const int64_t base = offset * params.na * params.nt + first;
            for (int64_t other = base; other < base + params.nt; ++other) {
              if (match_cell[other] == cell) add(other);
            }
          }
        } else {
          add(slot);
        }
        const scalar_t* at = logits + yolov5_logits_offset(head, params.na, params.no, cell);
        scalar_t* out = gradient + yolov5_gradient_offset(head, params.no, cell);
        for (int i = 0; i < 4; ++i) out[i * step] = static_cast<scalar_t>(box_scale * box[i]);
        if (params.nc == 1) continue;
        for (int c = 0; c < params.nc; ++c) class_logits[c] = static_cast<T>(at[(5 + c) * head.stride_o]);
        entropy_slopes(params.nc, class_logits.data(), positives.data(), matches, T(params.positive),
                       T(params.negative), T(params.cls_pw), T(params.fl_gamma), slopes.data());
        for (int c = 0; c < params.nc; ++c) out[(5 + c) * step] = static_cast<scalar_t>(class_scale * slopes[c]);
      }
    });
  }
}

}  // namespace
}  // namespace torch_fastdet::core::yolov5_loops
