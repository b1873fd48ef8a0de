// Compute the mask part of the segmentation loss on the CPU: positives, then rows of prototypes, in parallel.
#pragma once

#include <algorithm>
#include <vector>

#include "core/v8_loss/v8_mask_loss.h"

namespace torch_fastdet::core::v8_loops {

// Hold a row of an image's prototypes in T, and compute a positive's logits over it.
template <typename T>
class MaskRow {
 public:
  explicit MaskRow(const V8MaskProblem& p) : p_(p), pixels_(p.channels * p.width), logits_(p.width) {}

  template <typename scalar_t>
  void load(int64_t image, int64_t y, int64_t begin, int64_t end) {
    const V8Prototypes& protos = p_.protos;
    for (int64_t c = 0; c < p_.channels; ++c) {
      const auto* at =
          static_cast<const scalar_t*>(protos.at) + image * protos.stride_b + c * protos.stride_c + y * protos.stride_y;
      for (int64_t x = begin; x < end; ++x) channel(c)[x] = to_arithmetic(at[x * protos.stride_x]);
    }
  }

  const T* logits(const T* coefficients, int64_t begin, int64_t end) {
    std::fill(logits_.begin() + begin, logits_.begin() + end, T(0));
    for (int64_t c = 0; c < p_.channels; ++c) {
      for (int64_t x = begin; x < end; ++x) logits_[x] += coefficients[c] * channel(c)[x];
    }
    return logits_.data();
  }

  T* channel(int64_t c) { return pixels_.data() + c * p_.width; }

 private:
  const V8MaskProblem& p_;
  std::vector<T> pixels_, logits_;
};

template <typename scalar_t>
void load_coefficients(const V8MaskProblem& p, const V8MaskPositive& positive, arithmetic_t<scalar_t>* out) {
  const V8Coefficients& from = p.coefficients;
  const auto* at = static_cast<const scalar_t*>(from.at) + positive.anchor / p.anchors * from.stride_b +
                   positive.anchor % p.anchors * from.stride_a;
  for (int64_t c = 0; c < p.channels; ++c) out[c] = to_arithmetic(at[c * from.stride_c]);
}

// List the positives by group, in the order of slots. `count` is the number of valid rows of targets.
inline void list_positives(const V8MaskLossParams& params, int64_t count) {
  const V8MaskProblem& p = params.problem;
  std::vector<int32_t> last(p.bs, 0);
  for (int64_t row = 0; row < count; ++row) {
    const int64_t image = v8_row_image(params.targets, row, p.bs);
    if (image >= 0) params.numbers[row] = ++last[image];
  }
  const int64_t per_level = params.slots / p.levels;
  const auto group_of = [&](int64_t slot) { return slot / per_level * p.bs + v8_mask_image(params, slot); };
  std::fill_n(params.first, p.levels * p.bs + 1, int64_t{0});
  for (int64_t slot = 0; slot < params.slots; ++slot) {
    if (params.slot_anchor[slot] >= 0) ++params.first[group_of(slot) + 1];
  }
  for (int64_t g = 0; g < p.levels * p.bs; ++g) params.first[g + 1] += params.first[g];
  std::vector<int64_t> next(params.first, params.first + p.levels * p.bs);
  for (int64_t slot = 0; slot < params.slots; ++slot) {
    if (params.slot_anchor[slot] < 0) continue;
    const int64_t group = group_of(slot);
    params.positives[next[group]++] = v8_mask_positive(params, slot, params.numbers[v8_mask_row(params, slot)],
                                                       params.first[group + 1] - params.first[group]);
  }
}

template <typename scalar_t, typename ParallelFor>
void mask_forward(const V8MaskLossParams& params, int64_t rows, const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  const V8MaskProblem& p = params.problem;
  list_positives(params, rows);
  const int64_t count = params.first[p.levels * p.bs];
  std::vector<double> terms(count);
  parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    MaskRow<T> row(p);
    std::vector<T> coefficients(p.channels), gradients(p.width);
    for (int64_t i = begin; i < end; ++i) {
      const V8MaskPositive& positive = params.positives[i];
      const int64_t image = positive.anchor / p.anchors;
      T* unit = static_cast<T*>(params.unit_gradients) + i * p.channels;
      std::fill_n(unit, p.channels, T(0));
      load_coefficients<scalar_t>(p, positive, coefficients.data());
      double sum = 0;
      for (int64_t y = positive.y0; y < positive.y1; ++y) {
        row.template load<scalar_t>(image, y, positive.x0, positive.x1);
        const T* logits = row.logits(coefficients.data(), positive.x0, positive.x1);
        T of_row = 0;
        for (int64_t x = positive.x0; x < positive.x1; ++x) {
          const T wanted = T(v8_wanted_mask(p, positive, image, y, x));
          of_row += v8_softplus(logits[x]) - wanted * logits[x];
          gradients[x] = sigmoid(logits[x]) - wanted;
        }
        for (int64_t c = 0; c < p.channels; ++c) {
          T of_channel = 0;
          for (int64_t x = positive.x0; x < positive.x1; ++x) of_channel += gradients[x] * row.channel(c)[x];
          unit[c] += of_channel;
        }
        sum += static_cast<double>(of_row);
      }
      terms[i] = sum * v8_mask_share<double>(p, positive);
    }
  });
  double total = 0;
  for (const double term : terms) total += term;
  v8_mask_finish<T>(params, total, count);
}

template <typename scalar_t, typename ParallelFor>
void mask_backward(const V8MaskLossBackwardParams& params, const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  const V8MaskProblem& p = params.problem;
  const T scale = *static_cast<const T*>(params.grad_loss) * *static_cast<const T*>(params.scale);
  const V8Coefficients& by_coefficient = params.coefficient_gradients;
  if (by_coefficient.at) {
    std::fill_n(static_cast<scalar_t*>(by_coefficient.at), p.bs * p.channels * p.anchors, from_arithmetic<scalar_t>(0));
  }
  std::vector<T> of_anchor(p.channels);
  for (int64_t i = 0, group = 0; by_coefficient.at && i < params.first[p.levels * p.bs]; ++i) {
    while (i >= params.first[group + 1]) ++group;
    const V8MaskPositive& positive = params.positives[i];
    const auto same = [&](const V8MaskPositive& other) { return other.anchor == positive.anchor; };
    if (params.shared && std::any_of(params.positives + params.first[group], params.positives + i, same)) continue;
    std::fill(of_anchor.begin(), of_anchor.end(), T(0));
    for (int64_t k = i; k < (params.shared ? params.first[group + 1] : i + 1); ++k) {
      if (!same(params.positives[k])) continue;
      const T gradient = scale * v8_mask_share<T>(p, params.positives[k]);
      const T* unit = static_cast<const T*>(params.unit_gradients) + k * p.channels;
      for (int64_t c = 0; c < p.channels; ++c) of_anchor[c] += gradient * unit[c];
    }
    auto* at = static_cast<scalar_t*>(by_coefficient.at) + positive.anchor / p.anchors * by_coefficient.stride_b +
               positive.anchor % p.anchors * by_coefficient.stride_a;
    for (int64_t c = 0; c < p.channels; ++c) at[c * by_coefficient.stride_c] = from_arithmetic<scalar_t>(of_anchor[c]);
  }
  const V8Prototypes& by_proto = params.proto_gradients;
  parallel_for(0, by_proto.at ? p.bs * p.height : 0, 1, [&](int64_t begin, int64_t end) {
    MaskRow<T> row(p);
    std::vector<T> coefficients(p.channels), gradients(p.width), sums(p.channels * p.width);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = i / p.height, y = i % p.height;
      row.template load<scalar_t>(image, y, 0, p.width);
      std::fill(sums.begin(), sums.end(), T(0));
      for (int64_t group = image; group < p.levels * p.bs; group += p.bs) {
        for (int64_t k = params.first[group]; k < params.first[group + 1]; ++k) {
          const V8MaskPositive& positive = params.positives[k];
          if (y < positive.y0 || y >= positive.y1) continue;
          load_coefficients<scalar_t>(p, positive, coefficients.data());
          const T* logits = row.logits(coefficients.data(), positive.x0, positive.x1);
          const T gradient = scale * v8_mask_share<T>(p, positive);
          for (int64_t x = positive.x0; x < positive.x1; ++x) {
            gradients[x] = (sigmoid(logits[x]) - T(v8_wanted_mask(p, positive, image, y, x))) * gradient;
          }
          for (int64_t c = 0; c < p.channels; ++c) {
            for (int64_t x = positive.x0; x < positive.x1; ++x) sums[c * p.width + x] += gradients[x] * coefficients[c];
          }
        }
      }
      for (int64_t c = 0; c < p.channels; ++c) {
        auto* at = static_cast<scalar_t*>(by_proto.at) + image * by_proto.stride_b + c * by_proto.stride_c +
                   y * by_proto.stride_y;
        for (int64_t x = 0; x < p.width; ++x)
          at[x * by_proto.stride_x] = from_arithmetic<scalar_t>(sums[c * p.width + x]);
      }
    }
  });
}

}  // namespace torch_fastdet::core::v8_loops
