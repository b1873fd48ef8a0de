// Sums of slices one element at a time, which kernels and CPU loops are compared with, in every bit.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "core/slices/slices.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::slices_problem {

// Backend::sum(params) gives whether it ran.
template <class Backend>
void check(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  Backend::seed(seed);
  const DType dtype = random.one_of({DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64});
  SumSlicesParams p{};
  p.dtype = dtype;
  p.rows = random.chance(20) ? 1 : 1 + random.below(600);
  p.width = random.chance(50) ? 8 * (1 + random.below(12)) : 1 + random.below(random.chance(20) ? 5000 : 50);
  p.count = 1 + static_cast<int>(random.below(kMostSlices));
  const bool aligned = random.chance(60);
  const auto slice = [&] {
    const int64_t pitch = p.width + (aligned ? 8 * random.below(4) : random.below(9));
    return Tensor(dtype, {p.rows, p.width}, {pitch, 1}, aligned ? 8 * random.below(3) : random.below(9));
  };
  std::vector<Tensor> x;
  for (int i = 0; i < p.count; ++i) {
    x.push_back(slice());
    for (int64_t at = 0; at < x[i].numel(); ++at) x[i].set(at, random.normal());
    p.x[i] = x[i].data();
    p.x_pitch[i] = x[i].strides[0];
  }
  Tensor out = slice();
  p.out = out.data();
  p.out_pitch = out.strides[0];
  ASSERT_TRUE(Backend::sum(p));
  for (int64_t at = 0; at < out.numel(); ++at) {
    double want = x[0].get(at);
    for (int i = 1; i < p.count; ++i) want = rounded(dtype, want + x[i].get(at));
    ASSERT_EQ(out.get(at), want) << "element " << at << " of rows of " << p.width;
  }
  EXPECT_TRUE(out.surroundings_intact());
}

}  // namespace torch_fastdet::core::slices_problem
