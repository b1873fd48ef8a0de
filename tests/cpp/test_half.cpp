// Test every value of the tests' own half-precision types.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/half.h"

namespace torch_fastdet::core {
namespace {

// Each value comes back unchanged; the middle between two goes to the even one, and what is a little off goes to the
// nearer one.
template <typename T>
void check_rounding(uint16_t infinity) {
  for (uint32_t bits = 0; bits < infinity; ++bits) {
    T low, high;
    low.bits = static_cast<uint16_t>(bits);
    high.bits = static_cast<uint16_t>(bits + 1);
    ASSERT_EQ(T(float(low)).bits, low.bits);
    ASSERT_EQ(T(-float(low)).bits, low.bits | 0x8000);
    if (high.bits == infinity) break;
    const float middle = static_cast<float>((double(float(low)) + double(float(high))) / 2);
    if (middle == float(low) || middle == float(high)) continue;  // bfloat16's smallest: float has no value between
    ASSERT_EQ(T(middle).bits, low.bits % 2 ? high.bits : low.bits) << bits;
    ASSERT_EQ(T(std::nextafter(middle, -INFINITY)).bits, low.bits) << bits;
    ASSERT_EQ(T(std::nextafter(middle, INFINITY)).bits, high.bits) << bits;
  }
  EXPECT_EQ(T(INFINITY).bits, infinity);
  EXPECT_EQ(float(T(INFINITY)), INFINITY);
  EXPECT_TRUE(std::isnan(float(T(std::nanf("")))));
}

TEST(Half, Float16) {
  check_rounding<Float16>(0x7c00);
  EXPECT_EQ(float(Float16(65519.f)), 65504.f);
  EXPECT_EQ(float(Float16(65520.f)), INFINITY);
  EXPECT_EQ(float(Float16(0x1p-24f)), 0x1p-24f);
}

TEST(Half, BFloat16) {
  check_rounding<BFloat16>(0x7f80);
}

}  // namespace
}  // namespace torch_fastdet::core
