// Compute the loss of oriented boxes on the CPU.
#pragma once

#include <array>
#include <vector>

#include "core/v8_loss/v8_loss_loops.h"
#include "core/v8_loss/v8_obb_loss.h"

namespace torch_fastdet::core::v8_loops {

// `count` is the number of valid rows of targets, which have been checked.
template <typename scalar_t, typename ParallelFor>
void obb_forward(const V8ObbLossParams& params, int64_t count, const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  assign_all<scalar_t>(params, count, parallel_for);
  const int64_t slots = params.n * params.topk;
  std::fill_n(static_cast<T*>(params.slots.score), slots, T(1));  // the filter has emptied the slots that it dropped
  std::vector<std::array<T, kV8ObbTerms>> terms(slots);
  parallel_for(0, slots, kSlotGrain, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      T of_slot[kV8ObbTerms];
      v8_obb_terms<scalar_t>(params, slot, of_slot);
      std::copy_n(of_slot, kV8ObbTerms, terms[slot].begin());
    }
  });
  double sums[kV8ObbTerms] = {};
  for (const auto& of_slot : terms) {
    for (int term = 0; term < kV8ObbTerms; ++term) sums[term] += static_cast<double>(of_slot[term]);
  }
  sums[2] += class_sum<scalar_t>(params, parallel_for);
  v8_obb_finish<T>(params, sums);
}

template <typename scalar_t, typename ParallelFor>
void obb_backward(const V8ObbLossBackwardParams& params, const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  dense_gradients<scalar_t>(
      params,
      static_cast<const T*>(params.grad_loss)[params.grad_stride] * static_cast<const T*>(params.slots.scales)[1],
      parallel_for);
  std::fill_n(static_cast<scalar_t*>(params.angles.gradient), params.heads.bs * params.heads.anchors,
              from_arithmetic<scalar_t>(0));
  parallel_for(0, params.n * params.topk, kSlotGrain, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) v8_obb_gradient<scalar_t>(params, slot);
  });
}

}  // namespace torch_fastdet::core::v8_loops
