// Nested loops turn squares into channels. The kernels and CPU loops are compared with them: every pair of types, any
// strides of the image, both directions.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "core/space_to_depth/space_to_depth.h"
#include "dtypes.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::space_to_depth_problem {

using Sizes = std::vector<int64_t>;

inline Sizes channels_last_strides(const Sizes& size) {
  return {size[1] * size[2] * size[3], 1, size[1] * size[3], size[1]};
}

inline void fill(Tensor& tensor, Random& random) {
  for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, random.normal());
}

inline int64_t index(const Tensor& tensor, int64_t n, int64_t c, int64_t h, int64_t w) {
  return ((n * tensor.sizes[1] + c) * tensor.sizes[2] + h) * tensor.sizes[3] + w;
}

inline void set_strides(const Tensor& tensor, int64_t (&strides)[4]) {
  for (int d = 0; d < 4; ++d) strides[d] = tensor.strides[d];
}

// Backend::forward(params) and backward(params) return whether they ran.
template <class Backend>
void check(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  Backend::seed(seed);
  const auto dtype = [&] { return random.one_of(kEveryDtype); };
  SpaceToDepthParams p{};
  p.batch = 1 + random.below(3);
  p.channels = 1 + random.below(4);
  p.height = 2 * (1 + random.below(4));
  p.width = 2 * (1 + random.below(random.chance(20) ? 300 : 12));
  p.deep_channels = 4 * p.channels + random.below(9);
  if (random.chance(50)) p.deep_channels = (p.deep_channels + 7) / 8 * 8;
  p.border = random.below(2);
  const Sizes size{p.batch, p.channels, p.height, p.width};
  const Sizes deep_size{p.batch, p.deep_channels, p.deep_height(), p.deep_width()};
  const Sizes strides = random.chance(50) ? channels_last_strides(size) : Tensor::dense(size);

  Tensor x(dtype(), size, strides, random.below(4));
  Tensor deep(dtype(), deep_size, channels_last_strides(deep_size), random.chance(70) ? 0 : random.below(8));
  fill(x, random);
  set_strides(x, p.image_stride);
  set_strides(deep, p.deep_stride);
  p.source = x.data();
  p.target = deep.data();
  p.source_dtype = x.dtype;
  p.target_dtype = deep.dtype;
  ASSERT_TRUE(Backend::forward(p));
  for (int64_t n = 0; n < p.batch; ++n) {
    for (int64_t e = 0; e < p.deep_channels; ++e) {
      for (int64_t h = 0; h < p.deep_height(); ++h) {
        for (int64_t w = 0; w < p.deep_width(); ++w) {
          const bool zero = e >= 4 * p.channels || h < p.border || w < p.border;
          const int64_t y = 2 * (h - p.border) + e / 2 % 2, column = 2 * (w - p.border) + e % 2;
          const double want = zero ? 0 : rounded(deep.dtype, x.get(index(x, n, e / 4, y, column)));
          ASSERT_EQ(deep.get(index(deep, n, e, h, w)), want);
        }
      }
    }
  }
  EXPECT_TRUE(deep.surroundings_intact());

  std::vector<uint8_t> bytes(p.batch * p.channels * p.height * p.width);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.below(256));
  SpaceToDepthParams of_bytes = p;
  of_bytes.bytes = true;
  of_bytes.source = bytes.data();
  ASSERT_TRUE(Backend::forward(of_bytes));
  for (int64_t at = 0; at < deep.numel(); ++at) {
    const int64_t w = at % p.deep_width(), h = at / p.deep_width() % p.deep_height();
    const int64_t e = at / p.deep_width() / p.deep_height() % p.deep_channels;
    const int64_t n = at / p.deep_width() / p.deep_height() / p.deep_channels;
    const bool zero = e >= 4 * p.channels || h < p.border || w < p.border;
    const int64_t place = n * strides[0] + e / 4 * strides[1] + (2 * (h - p.border) + e / 2 % 2) * strides[2] +
                          (2 * (w - p.border) + e % 2) * strides[3];
    const float want = zero ? 0 : static_cast<float>(bytes[place]);
    // In float32 a multiplication by 1 / 255 and a division differ by a unit in the last place.
    if (deep.dtype == DType::kFloat16 || deep.dtype == DType::kBFloat16) {
      ASSERT_EQ(deep.get(at), rounded(deep.dtype, want / 255));
    } else {
      ASSERT_NEAR(deep.get(at), want / 255, 1e-7);
    }
  }
  EXPECT_TRUE(deep.surroundings_intact());

  const Sizes grad_strides = random.chance(50) ? channels_last_strides(deep_size) : Tensor::dense(deep_size);
  Tensor grad(dtype(), deep_size, grad_strides, random.below(4));
  Tensor grad_x(dtype(), size, strides, random.below(4));
  fill(grad, random);
  set_strides(grad, p.deep_stride);
  p.source = grad.data();
  p.target = grad_x.data();
  p.source_dtype = grad.dtype;
  p.target_dtype = grad_x.dtype;
  ASSERT_TRUE(Backend::backward(p));
  for (int64_t n = 0; n < p.batch; ++n) {
    for (int64_t c = 0; c < p.channels; ++c) {
      for (int64_t y = 0; y < p.height; ++y) {
        for (int64_t column = 0; column < p.width; ++column) {
          const int64_t e = 4 * c + 2 * (y % 2) + column % 2;
          const double value = grad.get(index(grad, n, e, y / 2 + p.border, column / 2 + p.border));
          ASSERT_EQ(grad_x.get(index(grad_x, n, c, y, column)), rounded(grad_x.dtype, value));
        }
      }
    }
  }
  EXPECT_TRUE(grad_x.surroundings_intact());
}

}  // namespace torch_fastdet::core::space_to_depth_problem
