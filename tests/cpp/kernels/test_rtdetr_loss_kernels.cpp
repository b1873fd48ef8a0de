// Compare the kernels of RT-DETR's loss with the CPU loops, which tests/ops/test_rtdetr_loss.py compares with the
// definition.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "backwards.h"
#include "core/linear_assignment/linear_assignment.h"
#include "core/rtdetr_loss/rtdetr_loss_loops.h"
#include "dtypes.h"
#include "emulator.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core {
namespace {

// Hold what a pass writes.
struct Results {
  Results(const RtdetrLossParams& p, DType arithmetic)
      : owner(p.images * (p.assigned.sets * p.assigned.queries + p.noisy.sets * p.noisy.queries)),
        quality(arithmetic, {static_cast<int64_t>(owner.size())}, 16),
        scales(arithmetic, {p.sets() * 4}, 16),
        loss(arithmetic, {1}),
        terms(arithmetic, {p.sets() * 3}, 16),
        status(kRtdetrStatusSize),
        boxes{Tensor(arithmetic, {p.images * p.assigned.sets * p.assigned.queries * 4}, 16),
              Tensor(arithmetic, {p.images * p.noisy.sets * p.noisy.queries * 4}, 16)},
        scores{Tensor(p.dtype, {p.images * p.assigned.sets * p.assigned.queries * p.classes}, 16),
               Tensor(p.dtype, {p.images * p.noisy.sets * p.noisy.queries * p.classes}, 16)},
        cost(arithmetic, {p.images * p.assigned.sets * p.assigned.queries * p.most}, 16),
        partials(arithmetic, {p.blocks() * 4}, 16),
        rows(p.images * p.assigned.sets * p.most),
        assignment(p.images * p.assigned.sets * assignment_scratch(p.assigned.queries, p.most)) {}

  RtdetrLossParams into(RtdetrLossParams p) {
    p.owner = owner.data();
    p.quality = quality.data();
    p.scales = scales.data();
    p.loss = loss.data();
    p.terms = terms.data();
    p.status = status.data();
    p.cost = cost.data();
    p.partials = partials.data();
    p.rows = rows.data();
    p.assignment = assignment.data();
    p.assigned.grad_boxes = boxes[0].data();
    p.noisy.grad_boxes = boxes[1].data();
    p.assigned.grad_scores = scores[0].data();
    p.noisy.grad_scores = scores[1].data();
    return p;
  }

  std::vector<int32_t> owner;
  Tensor quality, scales, loss, terms;
  std::vector<int64_t> status;
  Tensor boxes[2], scores[2], cost, partials;
  std::vector<int64_t> rows;
  std::vector<unsigned char> assignment;
};

void expect_near(const Tensor& found, const Tensor& wanted, double each, const char* name) {
  for (int64_t i = 0; i < found.numel(); ++i) {
    ASSERT_NEAR(found.get(i), wanted.get(i), each * (1 + std::abs(wanted.get(i)))) << name << " " << i;
  }
  EXPECT_TRUE(found.surroundings_intact()) << name;
}

void check(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  emulator::seed(seed);
  RtdetrLossParams p{};
  p.dtype = random.one_of(kEveryDtype);
  const DType arithmetic = arithmetic_dtype(p.dtype);
  p.images = 1 + random.below(3);
  p.classes = 1 + random.below(9);
  p.most = random.below(random.chance(20) ? 90 : 6);
  p.assigned.sets = 1 + random.below(2);
  p.assigned.queries = 1 + random.below(random.chance(30) ? 150 : 20);
  p.noisy.sets = random.below(3);
  p.noisy.queries = random.below(random.chance(30) ? 80 : 20);
  std::vector<float> targets(p.images * p.most * 5);
  std::vector<int64_t> counts(p.images), matches(p.images * p.noisy.queries);
  for (size_t i = 0; i < targets.size(); ++i) {
    targets[i] = i % 5 ? 0.01f * (1 + random.below(60)) : static_cast<float>(random.below(p.classes));
  }
  for (int64_t& count : counts) count = random.chance(20) ? 0 : random.below(p.most + 1);
  for (int64_t& match : matches) match = random.below(p.most + 2) - 1;
  const auto numbers = [&](DType dtype, int64_t count, bool boxes) {
    Tensor tensor(dtype, {count}, 16);
    for (int64_t i = 0; i < count; ++i) tensor.set(i, boxes ? 0.01 * (1 + random.below(60)) : random.normal());
    return tensor;
  };
  const int64_t assigned = p.images * p.assigned.sets * p.assigned.queries;
  const int64_t noisy = p.images * p.noisy.sets * p.noisy.queries;
  const Tensor boxes = numbers(arithmetic, assigned * 4, true), dn_boxes = numbers(arithmetic, noisy * 4, true);
  const Tensor scores = numbers(p.dtype, assigned * p.classes, false),
               dn_scores = numbers(p.dtype, noisy * p.classes, false);
  Tensor grad(arithmetic, {1});
  grad.set(0, 1.5);
  p.assigned.boxes = boxes.data();
  p.assigned.scores = scores.data();
  p.noisy.boxes = dn_boxes.data();
  p.noisy.scores = dn_scores.data();
  p.targets = targets.data();
  p.counts = counts.data();
  p.matches = matches.data();
  p.grad_loss = grad.data();
  for (int i = 0; i < 3; ++i) {
    p.gains[i] = 1 + random.below(3);
    p.costs[i] = 1 + random.below(3);
  }
  Results found(p, arithmetic), wanted(p, arithmetic);
  with_dtype<Halves>(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    rtdetr_loops::forward<T>(wanted.into(p), backwards);
    rtdetr_loops::backward<T>(wanted.into(p), backwards);
  });
  ASSERT_EQ(launch_rtdetr_loss(found.into(p), nullptr), cudaSuccess);
  ASSERT_EQ(launch_rtdetr_loss_backward(found.into(p), nullptr), cudaSuccess);
  EXPECT_EQ(found.owner, wanted.owner);
  EXPECT_EQ(found.status, (std::vector<int64_t>{0, 0}));
  const double each = arithmetic == DType::kFloat64 ? 1e-12 : 2e-5;
  const double last = p.dtype == DType::kFloat16 ? 1e-3 : p.dtype == DType::kBFloat16 ? 8e-3 : each;
  expect_near(found.quality, wanted.quality, each, "quality");
  expect_near(found.scales, wanted.scales, each, "scales");
  expect_near(found.terms, wanted.terms, each, "terms");
  expect_near(found.loss, wanted.loss, each, "loss");
  for (int i = 0; i < 2; ++i) {
    expect_near(found.boxes[i], wanted.boxes[i], each, "gradient of boxes");
    expect_near(found.scores[i], wanted.scores[i], last, "gradient of scores");
  }
}

TEST(RtdetrLossKernels, RandomProblems) {
  for (uint64_t seed = 0; seed < rounds(40) && !HasFailure(); ++seed) check(seed);
}

}  // namespace
}  // namespace torch_fastdet::core
