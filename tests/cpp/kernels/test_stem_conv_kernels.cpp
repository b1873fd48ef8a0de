// Compare stem_conv.cu with nested loops: every number of outputs, both kernels, images that end inside tiles.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/stem_conv/stem_conv.h"
#include "emulator.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core {
namespace {

void fill(Tensor& tensor, Random& random) {
  for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, random.normal());
}

class Problem {
 public:
  Problem(const StemConvSizes& sizes, DType dtype, Random& random)
      : sizes_(sizes),
        squares_(dtype, {sizes.batch, sizes.square_height(), sizes.square_width(), kStemChannels}),
        weight_(dtype, {sizes.outputs, sizes.side, sizes.side, kStemChannels}),
        grad_(dtype, {sizes.batch, sizes.height, sizes.width, sizes.outputs}) {
    for (Tensor* tensor : {&squares_, &weight_, &grad_}) fill(*tensor, random);
  }

  void check_forward() const {
    Tensor out(grad_.dtype, grad_.sizes);
    ASSERT_EQ(launch_stem_conv_forward({sizes_, squares_.data(), weight_.data(), out.data(), out.dtype}, nullptr),
              cudaSuccess);
    const std::vector<double> squares = squares_.values(), weights = weight_.values();
    std::vector<double> want(out.numel());
    for_products(
        [&](int64_t pixel, int64_t square, int64_t weight) { want[pixel] += squares[square] * weights[weight]; });
    expect_near(out, want);
  }

  void check_backward() const {
    Tensor grad_weight(weight_.dtype, weight_.sizes);
    int64_t blocks = 0;
    ASSERT_EQ(stem_conv_blocks(sizes_, blocks), cudaSuccess);
    Tensor parts(DType::kFloat32, {blocks, sizes_.weights()});
    const StemConvBackwardParams params{
        sizes_, grad_.data(), squares_.data(), grad_weight.data(), static_cast<float*>(parts.data()),
        blocks, grad_.dtype};
    ASSERT_EQ(launch_stem_conv_backward(params, nullptr), cudaSuccess);
    const std::vector<double> squares = squares_.values(), grads = grad_.values();
    std::vector<double> want(grad_weight.numel());
    for_products(
        [&](int64_t pixel, int64_t square, int64_t weight) { want[weight] += squares[square] * grads[pixel]; });
    expect_near(grad_weight, want);
    EXPECT_TRUE(parts.surroundings_intact());
  }

 private:
  // Call f(output, square's channel, weight) with the indices of each product.
  template <typename F>
  void for_products(F&& f) const {
    const StemConvSizes& s = sizes_;
    for (int64_t pixel = 0; pixel < s.batch * s.height * s.width; ++pixel) {
      const int64_t n = pixel / s.width / s.height;
      for (int64_t tap = 0; tap < s.side * s.side; ++tap) {
        const int64_t y = pixel / s.width % s.height + tap / s.side - s.border();
        const int64_t x = pixel % s.width + tap % s.side - s.border();
        if (y < 0 || x < 0 || y >= s.square_height() || x >= s.square_width()) continue;
        const int64_t square = ((n * s.square_height() + y) * s.square_width() + x) * kStemChannels;
        for (int64_t k = 0; k < s.outputs; ++k) {
          for (int64_t c = 0; c < kStemChannels; ++c) {
            f(pixel * s.outputs + k, square + c, (k * s.side * s.side + tap) * kStemChannels + c);
          }
        }
      }
    }
  }

  static void expect_near(const Tensor& got, const std::vector<double>& want) {
    double largest = 0;
    for (const double value : want) largest = std::max(largest, std::abs(value));
    const double bound = largest * (got.dtype == DType::kFloat16 ? 6e-4 : 4.5e-3) + 1e-6;
    for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got.get(i), want[i], bound) << "element " << i;
    EXPECT_TRUE(got.surroundings_intact());
  }

  StemConvSizes sizes_;
  Tensor squares_, weight_, grad_;
};

void check(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  emulator::seed(seed);
  StemConvSizes sizes{};
  sizes.batch = 1 + random.below(3);
  sizes.height = 1 + random.below(random.chance(30) ? 40 : 12);
  sizes.width = 1 + random.below(random.chance(30) ? 70 : 20);
  sizes.outputs = 16 * (1 + random.below(6));
  sizes.side = 2 + random.below(2);
  const Problem problem(sizes, random.one_of({DType::kFloat16, DType::kBFloat16}), random);
  problem.check_forward();
  problem.check_backward();
}

TEST(StemConvKernels, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(24) && !HasFailure(); ++seed) check(seed);
}

// There are more tiles than blocks, so a block's stages of shared memory take turns.
TEST(StemConvKernels, ManyTilesForABlock) {
  for (const int64_t side : {2, 3}) {
    Random random(side);
    emulator::seed(side);
    const Problem problem({2, 75, 110, 16, side}, DType::kFloat16, random);
    problem.check_forward();
    problem.check_backward();
  }
}

TEST(StemConvKernels, RefusesWhatItHasNoKernelFor) {
  const StemConvSizes sizes{1, 8, 8, 32, 3};
  for (const int64_t outputs : {0, 8, 24, 112}) {
    EXPECT_FALSE(stem_conv_has(outputs));
    EXPECT_EQ(launch_stem_conv_forward({{1, 8, 8, outputs, 3}, nullptr, nullptr, nullptr, DType::kFloat16}, nullptr),
              cudaErrorInvalidValue);
  }
  EXPECT_FALSE(stem_conv_fits({1 << 16, 1 << 8, 1 << 8, 16, 3}));
  EXPECT_FALSE(stem_conv_fits({1, 1 << 14, 1 << 14, 16, 3}));
  EXPECT_TRUE(stem_conv_fits(sizes));
  EXPECT_EQ(launch_stem_conv_forward({sizes, nullptr, nullptr, nullptr, DType::kFloat32}, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace torch_fastdet::core
