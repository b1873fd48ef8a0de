// Loops over elements sum slices and the channels of a padded tensor. The kernels and CPU loops are compared with them,
// in every bit except for sums of channels.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/slices/slices.h"
#include "dtypes.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::slices_problem {

// Backend::sum(params) returns whether it ran.
template <class Backend>
void check(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  Backend::seed(seed);
  const DType dtype = random.one_of(kEveryDtype);
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

// Return how far a sum may be from `sum` if the magnitudes of its elements add up to `size`.
inline double sum_limit(DType dtype, double sum, double size) {
  const double each = dtype == DType::kFloat64 ? 1e-15 : 1e-7;
  const double last = dtype == DType::kFloat16 ? 1e-3 : dtype == DType::kBFloat16 ? 8e-3 : each;
  return last * std::abs(sum) + 50 * each * size;
}

// Backend::rows(params) returns whether it ran.
template <class Backend>
void check_rows(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  Backend::seed(seed);
  SumRowsParams p{};
  p.dtype = random.one_of(kEveryDtype);
  p.rows = random.chance(20) ? 1 : 1 + random.below(random.chance(20) ? 40000 : 600);
  p.width = random.chance(50) ? 8 * (1 + random.below(40)) : 1 + random.below(70);
  Tensor x(p.dtype, {p.rows, p.width}, {p.width, 1}, random.chance(60) ? 0 : random.below(9));
  for (int64_t at = 0; at < x.numel(); ++at) x.set(at, random.normal());
  Tensor sums(p.dtype, {p.width}, {1}, random.below(9));
  Tensor partials(arithmetic_dtype(p.dtype), {p.splits(), p.width}, {p.width, 1}, 0);
  p.x = x.data();
  p.sums = sums.data();
  p.partials = partials.data();
  ASSERT_TRUE(Backend::rows(p));
  for (int64_t column = 0; column < p.width; ++column) {
    double sum = 0, size = 0;
    for (int64_t row = 0; row < p.rows; ++row) {
      const double each = x.get(row * p.width + column);
      sum += each;
      size += std::abs(each);
    }
    ASSERT_NEAR(sums.get(column), sum, sum_limit(p.dtype, sum, size)) << "column " << column;
  }
  EXPECT_TRUE(sums.surroundings_intact() && partials.surroundings_intact());
}

// Backend::pad(params) returns whether it ran.
template <class Backend>
void check_pad(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  Backend::seed(seed);
  const DType dtype = random.one_of(kEveryDtype);
  PadAndSumParams p{};
  p.dtype = dtype;
  p.batch = 1 + random.below(3);
  p.channels = 1 + random.below(random.chance(30) ? 150 : 20);
  p.padded = p.channels + random.below(70);
  p.pixels = 1 + random.below(random.chance(20) ? 12000 : 150);
  p.pixel_stride = random.chance(50) ? 1 : p.channels + random.below(5);
  p.channel_stride = p.pixel_stride == 1 ? p.pixels + random.below(5) : 1;
  p.image_stride = random.below(5) + (p.pixel_stride == 1 ? p.channels * p.channel_stride : p.pixels * p.pixel_stride);
  Tensor x(dtype, {p.batch, p.channels, p.pixels}, {p.image_stride, p.channel_stride, p.pixel_stride}, random.below(9));
  for (int64_t at = 0; at < x.numel(); ++at) x.set(at, random.normal());
  Tensor out(dtype, {p.batch, p.pixels, p.padded}, Tensor::dense({p.batch, p.pixels, p.padded}), random.below(9));
  Tensor sums(dtype, {p.padded}, {1}, random.below(9));
  const DType arithmetic = arithmetic_dtype(dtype);
  Tensor partials(arithmetic, {p.splits(), p.padded}, Tensor::dense({p.splits(), p.padded}), 0);
  p.x = x.data();
  p.out = out.data();
  p.sums = sums.data();
  p.partials = partials.data();
  ASSERT_TRUE(Backend::pad(p));
  for (int64_t c = 0; c < p.padded; ++c) {
    double sum = 0, size = 0;
    for (int64_t n = 0; n < p.batch; ++n) {
      for (int64_t q = 0; q < p.pixels; ++q) {
        const double want = c < p.channels ? x.get((n * p.channels + c) * p.pixels + q) : 0;
        ASSERT_EQ(out.get((n * p.pixels + q) * p.padded + c), want) << "channel " << c << ", pixel " << q;
        sum += want;
        size += std::abs(want);
      }
    }
    ASSERT_NEAR(sums.get(c), sum, sum_limit(dtype, sum, size));
  }
  EXPECT_TRUE(out.surroundings_intact() && sums.surroundings_intact() && partials.surroundings_intact());
}

}  // namespace torch_fastdet::core::slices_problem
