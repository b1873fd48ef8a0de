// Test the arctangent of a ratio, the plan of a broadcast, and the blocks of a loss; test_bbox_iou.cpp has the loops.
#include "core/boxes/box_math.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/boxes/bbox_iou.h"

namespace {

using namespace torch_fastdet::core;

TEST(BoxMath, AtanOfARatio) {
  for (int i = -2000; i <= 2000; ++i) {
    for (const float h : {1e-6f, 0.37f, 1.0f, 7.0f, 1e6f, -2.0f}) {
      const float w = static_cast<float>(i) * 0.0173f;
      const double exact = std::atan(static_cast<double>(w) / h);
      ASSERT_NEAR(atan_ratio(w, h), exact, 1.5e-7) << w << " / " << h;
      ASSERT_NEAR(atan_ratio(static_cast<double>(w), static_cast<double>(h)), exact, 1e-15);
    }
  }
  const float half_pi = static_cast<float>(std::acos(0.0));
  EXPECT_EQ(atan_ratio(2.0f, 0.0f), half_pi);
  EXPECT_EQ(atan_ratio(-2.0f, 0.0f), -half_pi);
  EXPECT_EQ(atan_ratio(0.0f, 0.0f), 0.0f);
  EXPECT_EQ(atan_ratio(0.0f, 3.0f), 0.0f);
}

// Element counts were int32 elsewhere (apex #1825, pytorch #101760).
TEST(BroadcastPlan, OffsetsBeyond32Bits) {
  BroadcastPlan<2> plan;
  const int64_t inner = 3, outer = int64_t(1) << 34;
  ASSERT_TRUE(plan.push(inner, {4, 0}));
  ASSERT_TRUE(plan.push(outer, {int64_t(1) << 20, 4}));
  int64_t offset[2];
  broadcast_offsets(plan, inner * outer - 1, offset);
  EXPECT_EQ(offset[0], 4 * 2 + (outer - 1) * (int64_t(1) << 20));
  EXPECT_EQ(offset[1], 4 * (outer - 1));
}

TEST(BroadcastPlan, NineDimensionsAreRefused) {
  BroadcastPlan<1> plan;
  for (int64_t d = 0; d < kMaxBroadcastDims; ++d) ASSERT_TRUE(plan.push(2, {1000 * (d + 1) * (d + 1)}));
  EXPECT_FALSE(plan.push(2, {1}));
}

TEST(IouLoss, BlocksDependOnTheNumberOfPairsAlone) {
  EXPECT_EQ(iou_loss_blocks(0), 1);
  EXPECT_EQ(iou_loss_blocks(256), 1);
  EXPECT_EQ(iou_loss_blocks(257), 2);
  EXPECT_EQ(iou_loss_blocks(kLossClusterPairs), kLossMaxCluster);
  EXPECT_EQ(iou_loss_blocks(kLossClusterPairs + 1), 33);
  EXPECT_EQ(iou_loss_blocks(int64_t(1) << 40), kLossMaxBlocks);
}

TEST(IouLoss, WorkspaceOnlyForASecondLaunch) {
  EXPECT_EQ(iou_loss_partials(256, false), 0);
  EXPECT_EQ(iou_loss_partials(3000, false), 8);
  EXPECT_EQ(iou_loss_partials(3000, true), 0);
  EXPECT_EQ(iou_loss_partials(kLossClusterPairs + 1, true), 33);
}

}  // namespace
