// Compute deformable attention by loops over points, pixels and channels; kernels and CPU loops are compared with them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/deformable_attention/deformable_attention.h"
#include "dtypes.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::deformable_problem {

// `width` is that of the widest level, by which places are multiplied.
inline void check_near(const Tensor& found, const std::vector<double>& wanted, DType arithmetic, int width,
                       const char* name) {
  const double each = (arithmetic == DType::kFloat64 ? 1e-14 : 1e-5) * (1 + width / 20);
  const double last = found.dtype == DType::kFloat16 ? 1e-3 : found.dtype == DType::kBFloat16 ? 8e-3 : 0;
  double most = 0;
  for (const double x : wanted) most = std::max(most, std::abs(x));
  for (int64_t i = 0; i < found.numel(); ++i) {
    ASSERT_NEAR(found.get(i), wanted[i], last * std::abs(wanted[i]) + each * most + 1e-7) << name << " " << i;
  }
  EXPECT_TRUE(found.surroundings_intact()) << name;
}

// Backend::run(params) returns whether it ran.
template <class Backend>
void check(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  Backend::seed(seed);
  DeformableAttentionParams p{};
  p.dtype = random.one_of(kEveryDtype);
  const DType arithmetic = arithmetic_dtype(p.dtype);
  p.batch = 1 + random.below(2);
  p.queries = static_cast<int32_t>(random.below(random.chance(20) ? 90 : 12));
  p.heads = static_cast<int32_t>(1 + random.below(3));
  p.channels = static_cast<int32_t>(random.chance(60) ? 8 * (1 + random.below(9)) : 1 + random.below(40));
  if (random.chance(5)) p.channels = 257 + static_cast<int32_t>(random.below(20));
  p.points = static_cast<int32_t>(random.below(5));
  p.level_count = static_cast<int32_t>(1 + random.below(3));
  int widest = 0;
  for (int l = 0; l < p.level_count; ++l) {
    const bool wide = random.chance(5);  // a row is more than one tile
    p.levels[l].height = static_cast<int32_t>(1 + random.below(wide ? 3 : 9));
    p.levels[l].width = static_cast<int32_t>(1 + random.below(wide ? 1700 : 9));
    widest = std::max(widest, p.levels[l].width);
    p.levels[l].first = p.pixels;
    p.pixels += p.levels[l].height * p.levels[l].width;
  }
  const auto numbers = [&](DType dtype, std::vector<int64_t> sizes, int offset) {
    Tensor tensor(dtype, sizes, offset);
    for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, random.normal());
    return tensor;
  };
  // Only outputs are checked for writes beside them; these are aligned to 16 bytes.
  const int64_t points = p.batch * p.queries * p.heads * p.level_count * p.points;
  const Tensor value = numbers(p.dtype, {p.batch, p.pixels, p.heads, p.channels}, 16);
  const Tensor grad = numbers(p.dtype, {p.batch, p.queries, p.heads, p.channels}, 16);
  Tensor weights = numbers(arithmetic, {points}, 16), locations = numbers(arithmetic, {points, 2}, 16);
  for (int64_t i = 0; i < 2 * points; ++i) {
    locations.set(i, random.chance(3) ? random.one_of({NAN, INFINITY, -INFINITY, 1e20f, -1e20f})
                                      : random.below(1 << 20) * 1.4 / (1 << 20) - 0.2);
  }
  Tensor out(p.dtype, {grad.numel()}, 16), grad_value(p.dtype, {value.numel()}, 16);
  Tensor grad_weights(arithmetic, {points}, 16), grad_locations(arithmetic, {2 * points}, 16);
  Tensor bounds(arithmetic, {p.batch * p.queries * p.heads}, 16);
  p.value = value.data();
  p.locations = locations.data();
  p.weights = weights.data();
  p.out = out.data();
  ASSERT_TRUE(out.numel() == 0 || Backend::run(p));
  ASSERT_TRUE(Backend::run(DeformableAttentionBackwardParams{p, grad.data(), grad_value.data(), grad_locations.data(),
                                                             grad_weights.data(), bounds.data()}));

  std::vector<double> sums(grad.numel()), value_sums(value.numel()), weight_sums(points), location_sums(2 * points);
  for (int64_t i = 0; i < points; ++i) {
    const int64_t row = i / p.points / p.level_count, head = row % p.heads, image = row / p.heads / p.queries;
    const DeformableLevel& level = p.levels[i / p.points % p.level_count];
    const double u = locations.get(2 * i), v = locations.get(2 * i + 1), weight = weights.get(i);
    if (!(std::abs(u) < 9 && std::abs(v) < 9)) continue;
    const double x = u * level.width - 0.5, y = v * level.height - 0.5;
    for (int row_of = 0; row_of < level.height; ++row_of) {
      for (int column = 0; column < level.width; ++column) {
        const double dx = std::abs(x - column), dy = std::abs(y - row_of);
        if (dx >= 1 || dy >= 1) continue;
        const int64_t pixel = image * p.pixels + level.first + row_of * level.width + column;
        for (int c = 0; c < p.channels; ++c) {
          const double pixel_value = value.get((pixel * p.heads + head) * p.channels + c);
          const double g = grad.get(row * p.channels + c);
          sums[row * p.channels + c] += weight * (1 - dx) * (1 - dy) * pixel_value;
          value_sums[(pixel * p.heads + head) * p.channels + c] += weight * (1 - dx) * (1 - dy) * g;
          weight_sums[i] += (1 - dx) * (1 - dy) * pixel_value * g;
          location_sums[2 * i] += weight * (1 - dy) * (x < column ? 1 : -1) * level.width * pixel_value * g;
          location_sums[2 * i + 1] += weight * (1 - dx) * (y < row_of ? 1 : -1) * level.height * pixel_value * g;
        }
      }
    }
  }
  check_near(out, sums, arithmetic, widest, "out");
  check_near(grad_value, value_sums, arithmetic, widest, "gradient of value");
  check_near(grad_weights, weight_sums, arithmetic, widest, "gradient of weights");
  check_near(grad_locations, location_sums, arithmetic, widest, "gradient of locations");
}

}  // namespace torch_fastdet::core::deformable_problem
