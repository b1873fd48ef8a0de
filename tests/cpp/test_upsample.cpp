// Test the plans of 2x upsampling and its vector code; tests/ops/test_upsample.py compares the loops' results.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "core/common/fast_divider.h"
#include "core/upsample/upsample_avx2.h"
#include "core/upsample/upsample_loops.h"

namespace torch_fastdet::core {
namespace {

struct Strides {
  int64_t value[4];
};

Strides nchw(int64_t c, int64_t h, int64_t w) {
  return {{c * h * w, h * w, w, 1}};
}
Strides nhwc(int64_t c, int64_t h, int64_t w) {
  return {{h * w * c, 1, w * c, c}};
}

struct Case {
  const char* name;
  int64_t size[4];
  bool channels_last;
  int64_t buffer_channels;  // of the large buffer; more than size[1]: a concatenation
};

const Case kCases[] = {
    {"nchw", {2, 3, 5, 7}, false, 3},
    {"nhwc", {2, 3, 5, 7}, true, 3},
    {"nchw into concat", {2, 3, 4, 6}, false, 8},
    {"nhwc into concat", {2, 3, 4, 6}, true, 8},
    {"one pixel", {1, 5, 1, 1}, false, 5},
    {"one pixel nhwc", {1, 5, 1, 1}, true, 5},
    {"no images", {0, 3, 4, 4}, false, 3},
    {"no channels", {2, 0, 4, 4}, true, 2},
    {"no rows", {2, 3, 0, 4}, true, 3},
    {"no columns", {2, 3, 4, 0}, false, 3},
};

class Upsample : public testing::TestWithParam<Case> {
 protected:
  int64_t n = GetParam().size[0], c = GetParam().size[1], h = GetParam().size[2], w = GetParam().size[3];
  int64_t buffer = GetParam().buffer_channels;
  bool channels_last = GetParam().channels_last;
  Strides small = channels_last ? nhwc(c, h, w) : nchw(c, h, w);
  Strides large = channels_last ? nhwc(buffer, 2 * h, 2 * w) : nchw(buffer, 2 * h, 2 * w);
  UpsamplePlan plan = make_upsample_plan(GetParam().size, small.value, large.value, channels_last);
};

// Every address that a kernel forms is inside the tensors, for any vector width (known bug 16).
TEST_P(Upsample, VectorsDivideEveryAddress) {
  for (const int itemsize : {2, 4, 8}) {
    for (const uintptr_t shift : {0, 1, 2, 4}) {
      const uintptr_t x = 512 + shift * itemsize, out = 1024 + 2 * shift * itemsize;
      const UpsampleVector vector = upsample_vector(plan, x, out, itemsize, 16);
      ASSERT_GE(vector.small, 1);
      ASSERT_GE(vector.large, 1);
      EXPECT_LE(vector.small * itemsize, 16);
      EXPECT_LE(vector.large * itemsize, 16);
      EXPECT_EQ(plan.inner % vector.small, 0);
      EXPECT_EQ((channels_last ? 1 : 2) * vector.small % vector.large, 0);
      for (int64_t row = 0; row < plan.extent[0] * plan.extent[1] * plan.extent[2]; ++row) {
        const int64_t i2 = row % plan.extent[2], i1 = row / plan.extent[2] % plan.extent[1],
                      i0 = row / plan.extent[2] / plan.extent[1];
        const int64_t a = i0 * plan.small_stride[0] + i1 * plan.small_stride[1] + i2 * plan.small_stride[2];
        const int64_t b = i0 * plan.large_stride[0] + i1 * plan.large_stride[1] + i2 * plan.large_stride[2];
        ASSERT_EQ((x + a * itemsize) % (vector.small * itemsize), 0u);
        ASSERT_EQ((out + b * itemsize) % (vector.large * itemsize), 0u);
        ASSERT_EQ((out + (b + plan.large_row) * itemsize) % (vector.large * itemsize), 0u);
        if (channels_last) {
          ASSERT_EQ((out + (b + plan.large_col) * itemsize) % (vector.large * itemsize), 0u);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Upsample, testing::ValuesIn(kCases), [](const auto& info) {
  std::string name = info.param.name;
  for (char& letter : name) letter = letter == ' ' ? '_' : letter;
  return name;
});

#ifdef TORCH_FASTDET_AVX2
// bfloat16 is by definition the upper half of a float, rounded to nearest, ties to even.
struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float value) {
    uint32_t all;
    std::memcpy(&all, &value, sizeof(all));
    bits = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((all + 0x7fff + (all >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t all = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &all, sizeof(value));
    return value;
  }
};

// Every count is tested for its tail; random bits include infinities, NaN and subnormal numbers.
template <typename T, typename Lanes>
void expect_avx2_equals_scalar() {
  if (!has_avx2()) {
    GTEST_SKIP() << "no AVX2 and F16C here";
  }
  std::mt19937 random(0);
  std::vector<T> values(4096), scalar(1024), vector(1024);
  for (T& value : values) {
    const uint16_t bits = static_cast<uint16_t>(random());
    std::memcpy(&value, &bits, sizeof(bits));
  }
  const auto expect_equal = [&](int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const float a = static_cast<float>(scalar[i]), b = static_cast<float>(vector[i]);
      ASSERT_TRUE(a == b || (std::isnan(a) && std::isnan(b))) << "element " << i << " of " << count;
    }
  };
  for (const int64_t count : {0, 1, 7, 8, 9, 15, 16, 23, 1000}) {
    const T* v = values.data();
    SumSquares<T, float>::rows(v, v + 2001, scalar.data(), count);
    SumSquaresAvx2<T, Lanes>::rows(v, v + 2001, vector.data(), count);
    expect_equal(count);
    SumSquares<T, float>::pixels(v, v + 1001, v + 2002, v + 3003, scalar.data(), count);
    SumSquaresAvx2<T, Lanes>::pixels(v, v + 1001, v + 2002, v + 3003, vector.data(), count);
    expect_equal(count);
  }
}

TEST(SumSquares, Avx2EqualsScalarInFloat16) {
  expect_avx2_equals_scalar<_Float16, Float16Lanes>();
}
TEST(SumSquares, Avx2EqualsScalarInBFloat16) {
  expect_avx2_equals_scalar<BFloat16, BFloat16Lanes>();
}
#endif

TEST(UpsampleVector, IsAsWideAsTheShapeAllows) {
  const auto width = [](int64_t c, int64_t h, int64_t w, bool channels_last, int itemsize) {
    const int64_t size[4] = {2, c, h, w};
    const Strides small = channels_last ? nhwc(c, h, w) : nchw(c, h, w);
    const Strides large = channels_last ? nhwc(c, 2 * h, 2 * w) : nchw(c, 2 * h, 2 * w);
    return upsample_vector(make_upsample_plan(size, small.value, large.value, channels_last), 512, 1024, itemsize, 16);
  };
  EXPECT_EQ(width(256, 40, 40, true, 2).small, 8);
  EXPECT_EQ(width(255, 40, 40, true, 2).small, 1);
  EXPECT_EQ(width(256, 40, 40, false, 2).small, 8);
  EXPECT_EQ(width(256, 20, 20, false, 2).small, 4);
  EXPECT_EQ(width(256, 20, 20, false, 2).large, 8);
  EXPECT_EQ(width(3, 13, 13, false, 2).small, 1);
  EXPECT_EQ(width(3, 13, 13, false, 2).large, 2);
  EXPECT_EQ(width(3, 13, 13, false, 8).large, 2);
  EXPECT_EQ(width(6, 8, 8, true, 4).small, 2);
}

TEST(IndexBlocks, CoverEveryIndexOnce) {
  const int64_t extents[][4] = {{3, 4, 5, 6}, {1, 1, 1, 100}, {7, 1, 3, 2}, {0, 4, 5, 6}, {2, 3, 0, 5}, {2, 3, 4, 0}};
  for (const auto& e : extents) {
    for (const int64_t limit : {1, 2, 5, 7, 30, 120, 1000}) {
      const IndexBlocks blocks(e[0], e[1], e[2], e[3], limit);
      std::vector<int> seen(e[0] * e[1] * e[2] * e[3], 0);
      for (int64_t k = 0; k < blocks.count(); ++k) {
        int64_t b[4], s[4];
        blocks.get(k, b, s);
        ASSERT_LE(s[0] * s[1] * s[2] * s[3], limit);
        for (int64_t i = b[0]; i < b[0] + s[0]; ++i)
          for (int64_t j = b[1]; j < b[1] + s[1]; ++j)
            for (int64_t y = b[2]; y < b[2] + s[2]; ++y)
              for (int64_t z = b[3]; z < b[3] + s[3]; ++z) ++seen[((i * e[1] + j) * e[2] + y) * e[3] + z];
      }
      EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
    }
  }
}

TEST(FastDivider, EqualsDivision) {
  const uint32_t numbers[] = {1, 2, 3, 5, 7, 20, 40, 255, 256, 257, 1000003, (1u << 30) - 1, 1u << 30, (1u << 31) - 1};
  for (const uint32_t divisor : numbers) {
    const FastDivider divider(divisor);
    for (const uint32_t base : numbers) {
      for (const int64_t near : {-1, 0, 1}) {
        const int64_t number = int64_t{base} * (base < 40000 ? divisor < 40000 ? divisor : 1 : 1) + near;
        if (number < 0 || number >= (int64_t{1} << 31)) continue;
        uint32_t n = static_cast<uint32_t>(number);
        const uint32_t remainder = divider.divide(n);
        EXPECT_EQ(n, number / divisor);
        EXPECT_EQ(remainder, number % divisor);
      }
    }
  }
}

}  // namespace
}  // namespace torch_fastdet::core
