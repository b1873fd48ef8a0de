// softmax_backward on the CPU: rows are shared among the threads by parallel_for(begin, end, grain, f).
#pragma once

#include <algorithm>

#include "core/common/storage.h"
#include "core/softmax/softmax.h"

namespace torch_fastdet::core::softmax_loops {

template <typename T, typename ParallelFor>
void softmax_backward(const SoftmaxBackwardParams& p, const ParallelFor& parallel_for) {
  using A = arithmetic_t<T>;
  parallel_for(0, p.batch * p.rows, std::max<int64_t>(1, 32768 / p.columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t n = row / p.rows, at = n * p.batch_stride + (row - n * p.rows) * p.row_stride;
      const T* const grad = static_cast<const T*>(p.grad) + at;
      const A* const y = static_cast<const A*>(p.y) + row * p.columns;
      A sum = 0;
      for (int64_t j = 0; j < p.columns; ++j) sum += y[j] * to_arithmetic(grad[j * p.column_stride]);
      T* const out = static_cast<T*>(p.out) + row * p.columns;
      for (int64_t j = 0; j < p.columns; ++j) {
        out[j] = from_arithmetic<T>(y[j] * to_arithmetic(grad[j * p.column_stride]) - y[j] * sum);
      }
    }
  });
}

}  // namespace torch_fastdet::core::softmax_loops
