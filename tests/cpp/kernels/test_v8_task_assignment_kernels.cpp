// Compare the kernels of v8_masked_loss and v8_posed_loss with their loops on the CPU, which the Python tests compare
// with oracles.
#include <gtest/gtest.h>

#include "backwards.h"
#include "core/v8_loss/v8_masked_loops.h"
#include "core/v8_loss/v8_posed_loss.h"
#include "emulator.h"
#include "v8_loss_problem.h"

namespace torch_fastdet::core {
namespace {

// Hold the results of a pass: rows by anchor, and the loss.
struct Results {
  std::map<int64_t, int64_t> rows;
  std::vector<double> loss;
};

// Run launch(params) with memory for `Params`, of which set(params) fills in its own part.
template <typename Params, typename T, typename Set, typename Launch>
Results run(const v8_problem::Problem<T>& problem, const Set& set, const Launch& launch) {
  const V8Heads& heads = problem.heads;
  const int64_t n = problem.n, slots = n * problem.topk, anchors = heads.bs * heads.anchors;
  std::vector<int64_t> slot_anchor(slots, 99), slot_row(slots, 99), first(heads.bs + 1), status(kV8StatusSize);
  std::vector<CornerBox<T>> boxes(anchors);
  std::vector<uint32_t> owner(anchors);
  std::vector<V8Target> targets(n);
  std::vector<uint64_t> best(2 * n);
  std::vector<T> score(slots), alignment(slots), overlap(slots), scales(3), items(3), loss(3);
  std::vector<int32_t> winner(slots);
  Params params{};
  params.heads = heads;
  params.targets = problem.targets.data(), params.n = n, params.num_targets = &problem.claimed;
  params.settings = problem.settings.data();
  params.class_weights = problem.weights.empty() ? nullptr : problem.weights.data();
  params.topk = problem.topk, params.topk2 = problem.topk2;
  params.slots = {slot_anchor.data(), slot_row.data(), score.data(), scales.data()};
  std::vector<T> slot_partials(4 * v8_slot_blocks(params)), class_partials(v8_class_blocks(params));
  params.scratch = {boxes.data(),     owner.data(),   targets.data(), first.data(),         best.data(),
                    alignment.data(), overlap.data(), winner.data(),  slot_partials.data(), class_partials.data()};
  params.loss = loss.data(), params.items = items.data(), params.status = status.data();
  set(params);
  launch(params);
  Results results{{}, {loss.begin(), loss.end()}};
  for (int64_t i = 0; i < slots; ++i) {
    if (slot_anchor[i] >= 0) results.rows[slot_anchor[i]] = slot_row[i];
  }
  return results;
}

void expect_same(const Results& got, const Results& want) {
  EXPECT_EQ(got.rows, want.rows);
  for (int part = 0; part < 3; ++part) {
    EXPECT_NEAR(got.loss[part], want.loss[part], 2e-5 * (1 + std::abs(want.loss[part])));
  }
}

Tensor make_tensor(Random& random, DType dtype, std::vector<int64_t> size) {
  Tensor tensor(dtype, size, Tensor::dense(size), 0);
  for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, static_cast<double>(random.below(9)) / 4 - 1);  // exact
  return tensor;
}

template <typename T>
void compare_masks(uint64_t seed, DType dtype) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  const auto problem = v8_problem::make_problem<T>(random, dtype, false);
  const V8Heads& heads = problem.heads;
  const int64_t n = problem.n, near = kV8NearFactor * problem.topk, channels = random.one_of({5, 32, 40});
  const int64_t height = 3 + random.below(20), width = 2 + random.below(30), mask_width = 2 * width;
  const int64_t mask_height = random.chance(50) ? height : 1 + random.below(40);
  const bool overlap = random.chance(50);
  const Tensor coefficients = make_tensor(random, dtype, {heads.bs, channels, heads.anchors});
  const Tensor protos = make_tensor(random, dtype, {heads.bs, channels, height, width});
  std::vector<uint8_t> masks((overlap ? heads.bs : n) * mask_height * mask_width);
  for (uint8_t& value : masks) value = static_cast<uint8_t>(random.below(overlap ? 6 : 2));
  std::vector<std::vector<int64_t>> near_anchors;
  std::vector<std::vector<T>> near_overlaps;
  const auto pass = [&](const auto& launch) {
    std::vector<float> area(n);
    std::vector<int32_t> number(n);
    near_anchors.emplace_back(n * near, -1);
    near_overlaps.emplace_back(n * near, T(0));
    const auto set = [&](V8MaskedLossParams& params) {
      V8MaskProblem& p = params.masks;
      const auto& c = coefficients.strides;
      const auto& q = protos.strides;
      p.dtype = dtype;
      p.coefficients = {coefficients.data(), c[0], c[1], c[2]};
      p.protos = {protos.data(), q[0], q[1], q[2], q[3]};
      p.masks = masks.data(), p.mask_type = V8MaskType::kUInt8, p.overlap = overlap;
      p.bs = heads.bs, p.anchors = heads.anchors, p.height = height, p.width = width;
      p.channels = static_cast<int32_t>(channels), p.levels = 1;
      params.mask_height = mask_height, params.mask_width = mask_width;
      params.near = static_cast<int32_t>(near);
      params.near_anchor = near_anchors.back().data(), params.near_overlap = near_overlaps.back().data();
      params.mask_area = area.data(), params.mask_number = number.data();
    };
    return run<V8MaskedLossParams>(problem, set, launch);
  };
  const Results want = pass([&](const auto& params) { v8_loops::masked_forward<T>(params, problem.used, backwards); });
  expect_same(pass([&](const auto& params) { ASSERT_EQ(launch_v8_masked_loss(params, nullptr), cudaSuccess); }), want);
  EXPECT_EQ(near_anchors[1], near_anchors[0]);
  for (int64_t i = 0; i < n * near; ++i) ASSERT_NEAR(near_overlaps[1][i], near_overlaps[0][i], 1e-6) << i;
}

template <typename T>
void compare_keypoints(uint64_t seed, DType dtype) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  const auto problem = v8_problem::make_problem<T>(random, dtype, false);
  const V8Heads& heads = problem.heads;
  const int64_t count = random.one_of({1, 5, 17}), columns = 2 + random.below(2), label_columns = 2 + random.below(2);
  const Tensor predictions = make_tensor(random, dtype, {heads.bs, count * columns, heads.anchors});
  std::vector<float> labels(problem.n * count * label_columns), sigmas(count, 0.2f);
  for (float& value : labels) value = static_cast<float>(random.below(17)) / 16 - (random.chance(10) ? 1.f : 0.f);
  const auto set = [&](V8PosedLossParams& params) {
    V8KeypointProblem& p = params.keypoints;
    p.dtype = dtype;
    p.predictions = predictions.data();
    p.stride_b = predictions.strides[0], p.stride_c = predictions.strides[1], p.stride_a = predictions.strides[2];
    p.labels = labels.data(), p.sigmas = sigmas.data(), p.centered = true;
    p.keypoints = static_cast<int32_t>(count), p.columns = static_cast<int32_t>(columns);
    p.label_columns = static_cast<int32_t>(label_columns);
  };
  const Results want = run<V8PosedLossParams>(
      problem, set, [&](const auto& params) { v8_loops::forward<T>(params, problem.used, backwards); });
  expect_same(
      run<V8PosedLossParams>(
          problem, set, [&](const auto& params) { ASSERT_EQ(launch_v8_posed_loss(params, nullptr), cudaSuccess); }),
      want);
}

TEST(V8TaskAssignmentKernels, SameAsLoops) {
  for (uint64_t seed = 0; seed < rounds(4) && !HasFailure(); ++seed) {
    emulator::seed(seed);
    if (seed % 2 == 0) {
      compare_masks<float>(seed, DType::kFloat32);
      compare_keypoints<double>(seed, DType::kFloat64);
    } else {
      compare_masks<double>(seed, DType::kFloat64);
      compare_keypoints<float>(seed, DType::kFloat32);
    }
  }
}

}  // namespace
}  // namespace torch_fastdet::core
