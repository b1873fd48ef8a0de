// Compare the CPU loops of bn_act with kernels/bn_act_problem.h, and test how the GPU divides a tensor.
#include <gtest/gtest.h>

#include "core/bn_act/bn_act_loops.h"
#include "kernels/backwards.h"
#include "kernels/bn_act_problem.h"

namespace torch_fastdet::core::bn_act_problem {
namespace {

struct Loops {
  static void seed(uint64_t) {}

  template <typename A>
  static bool run(Case<A>& c) {
    const bn_act_loops::Sizes sizes{c.x.batch, c.x.channels, c.x.pixels, c.x.channels_last};
    const BnActImage residual = c.with_residual ? c.residual.walk() : BnActImage{};
    bn_act_loops::forward<Halves>({sizes, c.dtype, c.x.walk(), residual, c.y.walk(), c.given(c.weight), c.given(c.bias),
                                   c.given(c.running_mean), c.given(c.running_var), c.batches.data(), c.given(c.mean),
                                   c.given(c.invstd), c.momentum, c.eps, c.activation, c.slope},
                                  backwards);
    bn_act_loops::backward<Halves>(
        {sizes, c.dtype, c.x.walk(), c.grad_y.walk(), c.grad_x.walk(), c.given(c.weight), c.given(c.bias),
         c.given(c.mean), c.given(c.invstd), c.given(c.grad_weight), c.given(c.grad_bias), c.activation, c.slope},
        backwards);
    return true;
  }

  template <typename A>
  static bool eval(Case<A>& c, int64_t first, const BnActPlan&) {
    const bn_act_loops::Sizes sizes{c.x.batch, c.x.channels, c.x.pixels, c.x.channels_last};
    const BnActImage residual = c.with_residual ? c.residual.walk() : BnActImage{};
    bn_act_loops::eval<Halves>(
        {sizes, c.dtype, c.x.walk(), residual, c.y.walk(), c.grad_x.walk(), first, c.given(c.weight), c.given(c.bias),
         c.given(c.running_mean), c.given(c.running_var), c.eps, c.activation, c.slope},
        backwards);
    return true;
  }
};

TEST(BnActLoops, RandomShapesAndLayouts) {
  check_random_shapes<Loops>(rounds(60));
}

TEST(BnActPlan, WidthFollowsFromEveryTensor) {
  alignas(16) static char memory[32];
  // Start from (2, 16, 24) of two bytes; each case changes one value of one tensor.
  for (const bool channels_last : {false, true}) {
    const BnActImage good = channels_last ? BnActImage{memory, 384, 1, 16} : BnActImage{memory, 384, 24, 1};
    const auto width = [&](const BnActImage& other, int64_t channels = 16, int64_t pixels = 24, int bytes = 2) {
      const int first = bn_act_vector(channels_last, channels, pixels, bytes, {other, good, good});
      EXPECT_EQ(first, bn_act_vector(channels_last, channels, pixels, bytes, {good, good, other}));
      return first;
    };
    EXPECT_EQ(width(good), 8);
    EXPECT_EQ(width(good, 16, 24, 4), 4);
    EXPECT_EQ(width(good, 16, 24, 8), 2);
    EXPECT_EQ(width({nullptr, 1, 3, 5}), 8);
    for (const int offset : {2, 4, 8}) {
      EXPECT_EQ(width({memory + offset, good.image, good.channel, good.pixel}), 1);
    }
    EXPECT_EQ(width({memory + 16, good.image, good.channel, good.pixel}), 8);
    EXPECT_EQ(width({memory, 388, good.channel, good.pixel}), 1);
    EXPECT_EQ(width({memory, 0, good.channel, good.pixel}), 8);  // expanded along the batch
    EXPECT_EQ(width({memory, good.image, good.channel + 1, good.pixel}), 1);
    EXPECT_EQ(width({memory, good.image, good.channel, good.pixel + 1}), 1);
    EXPECT_EQ(width(good, 17, 24), channels_last ? 1 : 8);
    EXPECT_EQ(width(good, 16, 35), channels_last ? 8 : 1);
  }
}

TEST(BnActPlan, EveryPositionAndChannelOnce) {
  for (uint64_t seed = 0; seed < rounds(500); ++seed) {
    Random random(seed);
    const bool channels_last = random.chance(50);
    const int vector = static_cast<int>(random.one_of({1, 2, 4, 8}));
    const int64_t channels = (1 + random.below(200)) * (channels_last ? vector : 1);
    const int64_t pixels = (1 + random.below(500)) * (channels_last ? 1 : vector);
    const BnActPlan plan =
        make_bn_act_plan(channels_last, 1 + random.below(9), channels, pixels, vector, 1 + random.below(300));
    ASSERT_LE(plan.slice_vectors, kBnActMostSliceVectors);
    ASSERT_LE(plan.slice_channels, kBnActThreads);
    ASSERT_GE(plan.slices * plan.slice_channels, channels);
    ASSERT_LT((plan.slices - 1) * plan.slice_channels, channels);
    int64_t next = 0;
    for (int split = 0; split < plan.splits; ++split) {
      ASSERT_EQ(plan.split_begin(split), next);
      ASSERT_GT(plan.split_size(split), 0);
      next += plan.split_size(split);
    }
    ASSERT_EQ(next, plan.positions());
    ASSERT_EQ(plan.count(), plan.batch * pixels);
  }
}

}  // namespace
}  // namespace torch_fastdet::core::bn_act_problem
