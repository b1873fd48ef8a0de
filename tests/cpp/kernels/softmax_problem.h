// A loop over elements computes the gradient of softmax. The kernel and the CPU loops are compared with it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "core/softmax/softmax.h"
#include "dtypes.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::softmax_problem {

// Backend::run(params) returns whether it ran.
template <class Backend>
void check(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  Backend::seed(seed);
  SoftmaxBackwardParams p{};
  p.dtype = random.one_of(kEveryDtype);
  p.batch = 1 + random.below(3);
  p.rows = 1 + random.below(80);
  p.columns = 1 + random.below(random.chance(20) ? kMostSoftmaxColumns : 100);
  const bool transposed = random.chance(60);
  p.row_stride = transposed ? 1 : p.columns + random.below(4);
  p.column_stride = transposed ? p.rows + random.below(4) : 1;
  p.batch_stride = random.below(4) + (transposed ? p.columns * p.column_stride : p.rows * p.row_stride);
  Tensor grad(p.dtype, {p.batch, p.rows, p.columns}, {p.batch_stride, p.row_stride, p.column_stride}, random.below(9));
  const DType arithmetic = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const std::vector<int64_t> sizes{p.batch, p.rows, p.columns};
  Tensor y(arithmetic, sizes, Tensor::dense(sizes), 0), out(p.dtype, sizes, Tensor::dense(sizes), random.below(9));
  for (int64_t at = 0; at < y.numel(); ++at) {
    y.set(at, std::abs(random.normal()) / p.columns);
    grad.set(at, random.normal());
  }
  p.grad = grad.data();
  p.y = y.data();
  p.out = out.data();
  ASSERT_TRUE(Backend::run(p));
  const double each = arithmetic == DType::kFloat64 ? 1e-15 : 1e-7;
  const double last = p.dtype == DType::kFloat16 ? 1e-3 : p.dtype == DType::kBFloat16 ? 8e-3 : each;
  for (int64_t row = 0; row < p.batch * p.rows; ++row) {
    double sum = 0, size = 0;
    for (int64_t at = row * p.columns; at < (row + 1) * p.columns; ++at) {
      sum += y.get(at) * grad.get(at);
      size += std::abs(y.get(at) * grad.get(at));
    }
    for (int64_t at = row * p.columns; at < (row + 1) * p.columns; ++at) {
      const double want = y.get(at) * (grad.get(at) - sum);
      const double near = last * std::abs(want) + 100 * each * y.get(at) * (std::abs(grad.get(at)) + size) + 1e-7;
      ASSERT_NEAR(out.get(at), want, arithmetic == DType::kFloat64 ? near - 1e-7 + 1e-15 : near);
    }
  }
  EXPECT_TRUE(out.surroundings_intact());
}

}  // namespace torch_fastdet::core::softmax_problem
