// Compare the kernels of the loss of oriented boxes with the CPU loops, which tests/ops/test_v8_obb_loss.py compares
// with an oracle.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "core/v8_loss/v8_obb_loops.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::v8_obb_problem {

// Hold the results of one run.
template <typename T>
struct Result {
  std::vector<T> loss, items, scales, score;
  std::vector<int64_t> anchor, row, status;
  std::vector<double> gradients[3];
};

struct Given {
  V8Heads heads{};
  std::vector<float> targets;
  std::vector<double> settings;
  int64_t n = 0, used = 0;
  int topk = 0, topk2 = 0;
};

inline Given make(Random& random, DType dtype) {
  Given g;
  g.heads.dtype = dtype;
  g.heads.bs = 1 + random.below(2);
  g.heads.nc = random.one_of({1, 5});
  g.heads.reg_max = random.one_of({16, 1});
  g.heads.num_levels = 2;
  g.heads.num_tensors = 2;
  g.heads.levels[0] = {0, 1, 0, 0, 6, 4, 8.f};
  g.heads.levels[1] = {0, 1, 24, 24, 3, 2, 16.f};
  g.heads.anchors = 30;
  g.heads.image_w = 48, g.heads.image_h = 32;
  g.n = random.one_of({0, 1, 6, 20});
  g.used = random.chance(60) ? g.n : g.n / 2;
  const auto part = [&] { return static_cast<float>(random.below(1000)) / 1000; };
  for (int64_t i = 0; i < g.n; ++i) {
    const float row[7] = {static_cast<float>(random.below(g.heads.bs)),
                          static_cast<float>(random.below(g.heads.nc)),
                          part(),
                          part(),
                          part() * (random.chance(20) ? 0.05f : 1.f),
                          part(),
                          6 * part() - 2};
    g.targets.insert(g.targets.end(), row, row + 7);
  }
  g.settings = {7.5, 0.5, 1.5, 0.3, 0.5, random.one_of({6.0, 2.0}), 1e-9, 16, 16, 2};
  g.topk = random.one_of({10, 3});
  g.topk2 = random.one_of({g.topk, 1});
  return g;
}

// Backend has slot_blocks, class_blocks, forward(params, rows in use) and backward(params).
template <class Backend, typename T>
Result<T> run(Given given, const Tensor (&heads)[3]) {
  Result<T> result;
  const int64_t slots = given.n * given.topk, anchors = given.heads.bs * 30;
  std::vector<Tensor> gradients;
  for (int i = 0; i < 3; ++i) {
    const auto& s = heads[i].strides;
    gradients.emplace_back(heads[i].dtype, heads[i].sizes, s);
    if (i == 2) continue;
    const auto channels = static_cast<int32_t>(heads[i].sizes[1]);
    given.heads.tensors[i] = {heads[i].data(),       nullptr,           s[0], s[1], 0, s[2], 30, 30, channels,
                              i == 0 ? channels : 0, V8Layout::kPlanes, true};
  }
  result.loss.assign(4, T(NAN)), result.items = result.scales = result.loss;
  result.score.assign(slots, T(NAN)), result.anchor.assign(slots, 99), result.row.assign(slots, 99);
  result.status.assign(kV8StatusSize, 99);
  std::vector<CornerBox<T>> boxes(anchors);
  std::vector<uint32_t> owner(anchors, 99);
  std::vector<V8Target> targets(given.n);
  std::vector<int64_t> first(given.heads.bs + 1, 99);
  std::vector<uint64_t> best(2 * given.n, 99);
  std::vector<T> alignment(slots, T(NAN)), overlap(slots, T(NAN));
  std::vector<int32_t> winner(slots, 99);
  V8ObbLossParams params{};
  params.heads = given.heads;
  params.angles = {heads[2].data(), heads[2].strides[0], heads[2].strides[2], nullptr, 0, 0};
  params.targets = given.targets.data(), params.n = given.n;
  params.num_targets = given.used == given.n ? nullptr : &given.used;
  params.settings = given.settings.data();
  params.topk = given.topk, params.topk2 = given.topk2;
  params.slots = {result.anchor.data(), result.row.data(), result.score.data(), result.scales.data()};
  std::vector<T> slot_partials(kV8ObbTerms * Backend::slot_blocks(params), T(NAN));
  std::vector<T> class_partials(Backend::class_blocks(params), T(NAN));
  params.scratch = {boxes.data(),     owner.data(),   targets.data(), first.data(),         best.data(),
                    alignment.data(), overlap.data(), winner.data(),  slot_partials.data(), class_partials.data()};
  params.loss = result.loss.data(), params.items = result.items.data(), params.status = result.status.data();
  EXPECT_TRUE(Backend::forward(params, given.used));

  V8ObbLossBackwardParams back{};
  back.heads = given.heads;
  for (int i = 0; i < 2; ++i) back.heads.tensors[i].gradient = gradients[i].data();
  back.angles = params.angles;
  back.angles.gradient = gradients[2].data();
  back.angles.gradient_b = gradients[2].strides[0], back.angles.gradient_a = gradients[2].strides[2];
  back.targets = params.targets, back.n = params.n, back.topk = params.topk, back.slots = params.slots;
  const std::vector<T> grad = {T(1), T(9), T(2), T(9), T(3), T(9), T(4)};
  back.grad_loss = grad.data(), back.grad_stride = 2;
  EXPECT_TRUE(Backend::backward(back));
  for (int i = 0; i < 3; ++i) result.gradients[i] = gradients[i].values();
  return result;
}

template <class First, class Second, typename T>
void check(uint64_t seed, DType dtype) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  const Given given = make(random, dtype);
  const int64_t bs = given.heads.bs;
  Tensor heads[3] = {
      {dtype, {bs, 4 * given.heads.reg_max, 30}}, {dtype, {bs, given.heads.nc, 30}}, {dtype, {bs, 1, 30}}};
  for (Tensor& tensor : heads) {
    for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, random.normal() + (given.heads.reg_max == 1 ? 1.5 : 0));
  }
  const auto mine = run<First, T>(given, heads), other = run<Second, T>(given, heads);
  EXPECT_EQ(mine.anchor, other.anchor);
  EXPECT_EQ(mine.row, other.row);
  EXPECT_EQ(mine.status, other.status);
  for (int k = 0; k < 4; ++k) {
    EXPECT_NEAR(mine.loss[k], other.loss[k], 1e-4 * (1 + std::abs(other.loss[k])));
    EXPECT_NEAR(mine.items[k], other.items[k], 1e-4 * (1 + std::abs(other.items[k])));
  }
  const double tolerance = dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 1e-2 : 1e-4;
  for (int i = 0; i < 3; ++i) {
    for (size_t e = 0; e < mine.gradients[i].size(); ++e) {
      ASSERT_NEAR(mine.gradients[i][e], other.gradients[i][e], tolerance * std::abs(other.gradients[i][e]) + 1e-5);
    }
  }
}

constexpr auto serial_for = [](int64_t begin, int64_t end, int64_t, const auto& f) { f(begin, end); };

template <typename scalar_t>
struct Loops {
  static int64_t slot_blocks(const V8ObbLossParams&) { return 0; }
  static int64_t class_blocks(const V8ObbLossParams&) { return 0; }
  static bool forward(const V8ObbLossParams& params, int64_t count) {
    v8_loops::obb_forward<scalar_t>(params, count, serial_for);
    return true;
  }
  static bool backward(const V8ObbLossBackwardParams& params) {
    v8_loops::obb_backward<scalar_t>(params, serial_for);
    return true;
  }
};

}  // namespace torch_fastdet::core::v8_obb_problem
