// Loops over box_math.h compute bbox_iou and iou_loss. The kernels and CPU loops are compared with them: broadcasting,
// strides, mixed types, the sums of the loss and of gradients.
#pragma once

#include <gtest/gtest.h>

#include <array>

#include "core/boxes/bbox_iou.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::boxes_problem {

struct Operand {
  Tensor boxes;  // (rows, 4)
  BoxesIn in;

  Operand(Random& random, DType dtype, int64_t rows, bool transposed)
      : boxes(dtype, {rows, 4}, transposed ? std::vector<int64_t>{1, rows} : std::vector<int64_t>{4, 1},
              transposed ? random.below(4) : 0),
        in{boxes.data(), boxes.strides[1], dtype, !transposed} {
    for (int64_t i = 0; i < boxes.numel(); ++i) {
      boxes.set(i, (i % 4 < 2 ? 1 : 16) + static_cast<double>(random.below(60)) / 4);  // a proper box either way
    }
  }
  template <typename T>
  void load(int64_t row, T (&out)[4]) const {
    for (int c = 0; c < 4; ++c) out[c] = static_cast<T>(boxes.get(row * 4 + c));
  }
};

template <typename F>
void with_kind(IouKind kind, F&& f) {
  if (kind == IouKind::kIou) return f(std::integral_constant<IouKind, IouKind::kIou>{});
  if (kind == IouKind::kGiou) return f(std::integral_constant<IouKind, IouKind::kGiou>{});
  if (kind == IouKind::kDiou) return f(std::integral_constant<IouKind, IouKind::kDiou>{});
  f(std::integral_constant<IouKind, IouKind::kCiou>{});
}

// Compare box1 (m, 1, 4) with box2 (1, n, 4), or pair by pair (n = 0).
template <class Backend, typename T>
void check(uint64_t seed, DType type1, DType type2) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  const int64_t m = random.one_of({1, 3, 31, 257, 1500}),
                n = random.chance(50) ? 0 : random.one_of({1, 2, 63, 64, 300});
  const int64_t rows = n && m == 1500 ? 5 : m, pairs = n ? rows * n : rows;
  const Operand box1(random, type1, rows, random.chance(30)), box2(random, type2, n ? n : rows, random.chance(30));
  const IouConfig config{random.one_of({IouKind::kIou, IouKind::kGiou, IouKind::kDiou, IouKind::kCiou}),
                         random.chance(50), 1e-7};
  const int64_t step1 = box1.boxes.strides[0], step2 = box2.boxes.strides[0];
  BroadcastPlan<2> plan;
  if (n) {
    plan.push(n, {0, step2});
    plan.push(rows, {step1, 0});
  } else {
    plan.push(rows, {step1, step2});
  }
  const auto first = [&](int64_t i) { return n ? i / n : i; };
  const auto second = [&](int64_t i) { return n ? i % n : i; };
  std::vector<double> ious(pairs), grads(pairs);
  Tensor grad(type1, {pairs}, random.below(2));
  std::vector<std::array<double, 4>> grad1(rows), grad2(n ? n : rows);
  double total = 0;
  for (int64_t i = 0; i < pairs; ++i) grad.set(i, random.normal());
  with_kind(config.kind, [&](auto kind) {
    for (int64_t i = 0; i < pairs; ++i) {
      T a[4], b[4], by1[4], by2[4];
      box1.load(first(i), a);
      box2.load(second(i), b);
      const T eps = static_cast<T>(config.eps);
      const auto left = make_box(a, config.xywh, eps), right = make_box(b, config.xywh, eps);
      ious[i] = box_iou<decltype(kind)::value>(left, right, eps);
      total += 1 - ious[i];
      Box<T> by_left, by_right;
      box_iou_grad<decltype(kind)::value>(left, right, eps, static_cast<T>(grad.get(i)) * T(-1), by_left, by_right);
      fold_box_grad(by_left, config.xywh, by1);
      fold_box_grad(by_right, config.xywh, by2);
      for (int c = 0; c < 4; ++c) {
        grad1[first(i)][c] += by1[c];
        grad2[second(i)][c] += by2[c];
      }
    }
  });

  const DType out_type = random.one_of({DType::kFloat16, DType::kFloat32, DType::kFloat64});
  Tensor out(out_type, {pairs});
  const bool loss = random.chance(50);
  ASSERT_TRUE(Backend::run(BboxIouParams{box1.in, box2.in, plan, config, loss, out.data(), out_type}));
  for (int64_t i = 0; i < pairs; ++i) {
    const T want = loss ? T(1) - static_cast<T>(ious[i]) : static_cast<T>(ious[i]);
    ASSERT_NEAR(out.get(i), rounded(out_type, want), out_type == DType::kFloat16 ? 2e-3 : 1e-5) << i;
  }

  const DType arithmetic = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
  const int64_t partials = iou_loss_partials(pairs, false);
  Tensor partial(arithmetic, {std::max<int64_t>(partials, 1)}), sum(DType::kFloat32, {1});
  IouLossParams l{box1.in, box2.in, plan, config, IouReduction::kSum, nullptr, sum.data(), DType::kFloat32};
  l.partial = partials ? partial.data() : nullptr;
  ASSERT_TRUE(Backend::run(l));
  EXPECT_NEAR(sum.get(0), total, 1e-4 * (1 + std::abs(total)));

  Tensor out1(type1, {rows, 4}), out2(type2, {n ? n : rows, 4});
  IouBackwardParams b{box1.in, box2.in, config, grad.data(), type1, -1.0, 1, {}};
  if (n) {
    b.passes = 2;
    b.pass[0].pairs.push(n, {0, step2, 1});
    b.pass[0].pairs.push(rows, {step1, 0, n});
    b.pass[0].rows = rows, b.pass[0].reduce = n, b.pass[0].grad1 = out1.data();
    b.pass[1].pairs.push(rows, {step1, 0, n});
    b.pass[1].pairs.push(n, {0, step2, 1});
    b.pass[1].rows = n, b.pass[1].reduce = rows, b.pass[1].grad2 = out2.data();
  } else {
    b.pass[0].pairs.push(rows, {step1, step2, 1});
    b.pass[0].rows = rows, b.pass[0].grad1 = out1.data(), b.pass[0].grad2 = out2.data();
  }
  ASSERT_TRUE(Backend::run(b));
  const auto expect_grads = [](const Tensor& got, const std::vector<std::array<double, 4>>& want) {
    const double tolerance = got.dtype == DType::kFloat16 || got.dtype == DType::kBFloat16 ? 1e-2 : 1e-4;
    for (size_t r = 0; r < want.size(); ++r) {
      for (int c = 0; c < 4; ++c) {
        ASSERT_NEAR(got.get(r * 4 + c), want[r][c], tolerance * (1 + std::abs(want[r][c]))) << "row " << r;
      }
    }
    EXPECT_TRUE(got.surroundings_intact());
  };
  expect_grads(out1, grad1);
  expect_grads(out2, grad2);
}

template <class Backend>
void check_random_pairs(uint64_t seeds) {
  constexpr DType kHalves[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
  for (uint64_t seed = 0; seed < seeds && !testing::Test::HasFailure(); ++seed) {
    Backend::seed(seed);
    check<Backend, float>(seed, kHalves[seed % 3], kHalves[seed / 3 % 3]);
    check<Backend, double>(seed, DType::kFloat64, seed % 2 ? DType::kFloat64 : kHalves[seed % 3]);
  }
}

}  // namespace torch_fastdet::core::boxes_problem
