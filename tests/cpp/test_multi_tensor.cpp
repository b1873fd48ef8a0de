// Compare the CPU loops of multi_tensor with kernels/multi_tensor_problem.h, and the work list's planning and the
// step's arithmetic with loops that only count.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/multi_tensor/multi_tensor_loops.h"
#include "kernels/backwards.h"
#include "kernels/multi_tensor_problem.h"

namespace {

using namespace torch_fastdet::core;

using multi_tensor_problem::TestList;

struct Loops {
  static void seed(uint64_t) {}
  static bool reduce(TestList& list, const ReduceParams& params) {
    const multi_tensor_loops::Work work(list.device_rows, list.layouts);
    multi_tensor_loops::reduce<Halves>(work, params, list.workspace, backwards);
    return true;
  }
  static bool update(TestList& list, const UpdateParams& params, const std::vector<Group>& groups) {
    const multi_tensor_loops::Work work(list.device_rows, list.layouts);
    multi_tensor_loops::update<Halves>(work, params, groups.data(), list.workspace, backwards);
    return true;
  }
};

TEST(MultiTensorLoops, RandomListsAndSteps) {
  for (uint64_t seed = 0; seed < rounds(150) && !HasFailure(); ++seed) {
    multi_tensor_problem::reduce_and_update<Loops>(seed);
  }
}

TEST(MultiTensorLoops, SumsInAFixedOrder) {
  multi_tensor_problem::check_order_of_sums<Loops>();
}

// Segments must cover each row once, in order, without gaps, and none may be empty.
void expect_covers(const std::vector<int64_t>& numels) {
  const auto segments = plan_segments(numels);
  std::vector<int64_t> next(numels.size(), 0);
  int64_t total = 0;
  for (const int64_t numel : numels) total += numel;
  int32_t last_row = 0;
  for (const Segment& segment : segments) {
    ASSERT_GE(segment.row, last_row);
    ASSERT_LT(segment.row, static_cast<int64_t>(numels.size()));
    ASSERT_GT(segment.count, 0);
    ASSERT_LE(segment.count, segment_elements(total));
    ASSERT_EQ(segment.start, next[segment.row]);
    next[segment.row] += segment.count;
    last_row = segment.row;
  }
  EXPECT_EQ(next, numels);
}

TEST(PlanSegments, CoversSizesAroundASegment) {
  for (int64_t size = 0; size < 5; ++size) expect_covers({size});
  for (int64_t size : {1023, 1024, 1025, 2047, 2048, 2049, 8191, 8192, 8193}) expect_covers({size, 3, size});
}

// Tensors may have size 0 (pytorch #94865, #100811); an empty last one left work unlaunched (TransformerEngine #3212).
TEST(PlanSegments, EmptyTensorsFirstMiddleAndLast) {
  expect_covers({0, 5, 0, 0, 4097, 0});
  expect_covers({0, 0, 0});
  expect_covers({});
  EXPECT_TRUE(plan_segments({0, 0}).empty());
}

// With several hundred tensors metadata was read past its end (pytorch #189827).
TEST(PlanSegments, ThousandsOfTensors) {
  std::vector<int64_t> numels;
  for (int64_t i = 0; i < 5000; ++i) numels.push_back(i % 7 == 0 ? 0 : (i * 131) % 3001);
  expect_covers(numels);
}

// Sizes were kept as int32 (apex #1825).
TEST(PlanSegments, MoreThan2To31Elements) {
  const int64_t huge = (int64_t(1) << 31) + 12345;
  expect_covers({7, huge, 0, 1024});
  const auto segments = plan_segments({7, huge, 0, 1024});
  EXPECT_LE(static_cast<int64_t>(segments.size()), kMaxSegments + 4);
  bool beyond = false;
  for (const Segment& segment : segments) beyond = beyond || segment.start > std::numeric_limits<int32_t>::max();
  EXPECT_TRUE(beyond);
}

// Eight tiny tensors share one block's chunk: there are as many segments as tensors, and an eighth as many blocks.
TEST(PlanSegments, PacksTinyTensors) {
  EXPECT_EQ(plan_segments(std::vector<int64_t>(64, 16)).size(), 64u);
  EXPECT_EQ(kSegmentElements * kWarpsPerBlock, 8192);
}

TEST(MergeDims, MergesWhatLiesTogetherInAllTensors) {
  const int64_t sizes[] = {2, 3, 4, 5};
  const int64_t nchw[] = {60, 20, 5, 1}, nhwc[] = {60, 1, 15, 3};
  const int64_t* both[kSlots] = {nchw, nhwc, nullptr, nullptr};
  Layout layout;
  ASSERT_TRUE(merge_dims(layout, 4, sizes, both));
  EXPECT_EQ(layout.dims, 3);  // H and W lie together in both
  for (int64_t i = 0; i < 120; ++i) {
    int64_t offsets[kSlots];
    layout_offsets(layout, i, offsets);
    const int64_t w = i % 5, h = i / 5 % 4, c = i / 20 % 3, n = i / 60;
    EXPECT_EQ(offsets[kParam], n * 60 + c * 20 + h * 5 + w);
    EXPECT_EQ(offsets[kGrad], n * 60 + c + h * 15 + w * 3);
  }
}

TEST(MergeDims, SaysWhereTooManyRemain) {
  std::vector<int64_t> sizes(kMaxDims + 1, 2), strides(kMaxDims + 1);
  for (size_t i = 0; i < strides.size(); ++i) strides[i] = int64_t(3) << (2 * (strides.size() - i));
  const int64_t* one[kSlots] = {strides.data(), nullptr, nullptr, nullptr};
  Layout layout;
  EXPECT_FALSE(merge_dims(layout, static_cast<int64_t>(sizes.size()), sizes.data(), one));
  sizes[0] = 1;  // a dimension of size 1 needs no place
  EXPECT_TRUE(merge_dims(layout, static_cast<int64_t>(sizes.size()), sizes.data(), one));
}

}  // namespace
