// Nested loops compute max pooling. The kernels and CPU loops are compared with them: both layouts, every type, parts
// of larger tensors, windows larger than the map, NaN.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "core/pool/max_pool.h"
#include "dtypes.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::pool_problem {

// A part is (N, C, H, W) at `first` of a tensor of `all` channels.
struct Part {
  int64_t channels, height, width, all, first;
  Tensor buffer;

  Part(DType dtype, const std::vector<int64_t>& size, int64_t all, int64_t first, bool channels_last, int64_t offset)
      : channels(size[1]),
        height(size[2]),
        width(size[3]),
        all(all),
        first(first),
        buffer(dtype, {size[0], all, size[2], size[3]},
               channels_last ? std::vector<int64_t>{all * size[2] * size[3], 1, all * size[3], all}
                             : std::vector<int64_t>{all * size[2] * size[3], size[2] * size[3], size[3], 1},
               offset) {}
  int64_t index(int64_t n, int64_t c, int64_t h, int64_t w) const {
    return ((n * all + first + c) * height + h) * width + w;
  }
  double get(int64_t n, int64_t c, int64_t h, int64_t w) const { return buffer.get(index(n, c, h, w)); }
  void fill(Random& random) {
    // Few values make windows have equal ones, and sums exact in every type.
    for (int64_t i = 0; i < buffer.numel(); ++i) buffer.set(i, static_cast<double>(random.below(9)) / 4 - 1);
  }
  PoolTensor tensor() const {
    return {buffer.at(index(0, 0, 0, 0)), {buffer.strides[0], buffer.strides[1], buffer.strides[2], buffer.strides[3]}};
  }
};

// Places have a byte for each element, dense in either layout.
struct Places {
  std::vector<uint8_t> bytes;
  PoolTensor tensor;

  Places(const std::vector<int64_t>& s, bool channels_last) : bytes(s[0] * s[1] * s[2] * s[3] + 16, 255) {
    auto* start = bytes.data();
    while (reinterpret_cast<uintptr_t>(start) % 16) ++start;
    tensor = channels_last ? PoolTensor{start, {s[1] * s[2] * s[3], 1, s[1] * s[3], s[1]}}
                           : PoolTensor{start, {s[1] * s[2] * s[3], s[2] * s[3], s[3], 1}};
  }
  int at(int64_t n, int64_t c, int64_t h, int64_t w) const {
    return static_cast<const uint8_t*>(tensor.data)[tensor.offset(n, c, h, w)];
  }
};

template <typename F>
void each(const MaxPoolParams& p, F&& f) {
  for (int64_t n = 0; n < p.batch; ++n) {
    for (int64_t c = 0; c < p.channels; ++c) {
      for (int64_t h = 0; h < p.height; ++h) {
        for (int64_t w = 0; w < p.width; ++w) f(n, c, h, w);
      }
    }
  }
}

// Backend::forward(params) and backward(params) return whether they ran.
template <class Backend>
void check(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  Backend::seed(seed);
  const DType dtype = random.one_of(kEveryDtype);
  const bool last = random.chance(60);
  const std::vector<int64_t> size{1 + random.below(2), random.one_of({1, 3, 8, 16, 40}), 1 + random.below(8),
                                  1 + random.below(9)};
  const auto part = [&](int64_t more) {
    return Part(dtype, size, size[1] + more, random.chance(50) ? more : 0, last,
                random.chance(80) ? 0 : random.below(8));
  };
  MaxPoolParams p{};
  p.batch = size[0];
  p.channels = size[1];
  p.height = size[2];
  p.width = size[3];
  p.source_height = p.height;
  p.source_width = p.width;
  p.before = static_cast<int>(random.one_of({0, 1, 2, 2, 3, 7}));
  p.after = random.chance(70) ? p.before : static_cast<int>(random.one_of({0, 1, 3}));
  p.channels_last = last;
  p.dtype = dtype;
  Part x = part(8), y = part(16), copy = part(8);
  Places places(size, last);
  x.fill(random);
  p.source = x.tensor();
  p.target = y.tensor();
  p.indices = places.tensor;
  const bool copies = random.chance(50);
  if (copies) p.copy = copy.tensor();
  ASSERT_TRUE(Backend::forward(p));
  const int side = p.before + 1 + p.after;
  each(p, [&](int64_t n, int64_t c, int64_t h, int64_t w) {
    double want = -INFINITY;
    int place = -1;
    for (int64_t i = h - p.before; i <= h + p.after; ++i) {
      for (int64_t j = w - p.before; j <= w + p.after; ++j) {
        if (i < 0 || j < 0 || i >= p.height || j >= p.width || x.get(n, c, i, j) <= want) continue;
        want = x.get(n, c, i, j);
        place = static_cast<int>((i - h + p.before) * side + j - w + p.before);
      }
    }
    ASSERT_EQ(y.get(n, c, h, w), want);
    ASSERT_EQ(places.at(n, c, h, w), place);
    EXPECT_TRUE(!copies || copy.get(n, c, h, w) == x.get(n, c, h, w));
  });
  // Run without places and a copy.
  Part alone = part(8);
  MaxPoolParams values = p;
  values.target = alone.tensor();
  values.indices = values.copy = PoolTensor{};
  ASSERT_TRUE(Backend::forward(values));
  each(p, [&](int64_t n, int64_t c, int64_t h, int64_t w) { ASSERT_EQ(alone.get(n, c, h, w), y.get(n, c, h, w)); });

  Part grad = part(8), own = part(24), grad_x = part(0);
  grad.fill(random);
  own.fill(random);
  p.source = grad.tensor();
  p.copy = copies ? own.tensor() : PoolTensor{};
  std::swap(p.before, p.after);
  p.target = grad_x.tensor();
  ASSERT_TRUE(Backend::backward(p));
  std::vector<double> wanted(grad_x.buffer.numel());
  each(p, [&](int64_t n, int64_t c, int64_t h, int64_t w) {
    if (copies) wanted[grad_x.index(n, c, h, w)] += own.get(n, c, h, w);
    const int place = places.at(n, c, h, w);
    wanted[grad_x.index(n, c, h + place / side - p.after, w + place % side - p.after)] += grad.get(n, c, h, w);
  });
  each(p, [&](int64_t n, int64_t c, int64_t h, int64_t w) {
    ASSERT_EQ(grad_x.get(n, c, h, w), rounded(dtype, wanted[grad_x.index(n, c, h, w)]));
  });
  EXPECT_TRUE(grad_x.buffer.surroundings_intact());
}

// The last of several NaNs counts, and infinities are values.
template <class Backend>
void check_nan_and_infinity() {
  for (const bool last : {false, true}) {
    const std::vector<int64_t> size{1, 8, 3, 4};
    Part x(DType::kFloat32, size, 8, 0, last, 0), y(DType::kFloat32, size, 8, 0, last, 0);
    for (int64_t i = 0; i < x.buffer.numel(); ++i) x.buffer.set(i, -INFINITY);
    x.buffer.set(x.index(0, 1, 0, 1), NAN);
    x.buffer.set(x.index(0, 1, 1, 2), NAN);
    x.buffer.set(x.index(0, 2, 1, 1), INFINITY);
    Places places(size, last);
    MaxPoolParams p{1, 8, 3, 4, 3, 4, 1, 1, last, x.tensor(), y.tensor(), places.tensor, {}, DType::kFloat32};
    ASSERT_TRUE(Backend::forward(p));
    EXPECT_EQ(places.at(0, 0, 0, 0), 4);  // all -inf: the first place inside of the map
    EXPECT_EQ(places.at(0, 1, 1, 1), 5);  // the later of two NaNs
    EXPECT_TRUE(std::isnan(y.get(0, 1, 1, 1)));
    EXPECT_EQ(y.get(0, 2, 0, 0), INFINITY);
  }
}

}  // namespace torch_fastdet::core::pool_problem
