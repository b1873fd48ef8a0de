// Values against a naive IoU that rasterises or measures by hand, gradients against central differences in double.
#include "core/boxes/box_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/boxes/bbox_iou.h"

namespace {

using namespace torch_fastdet::core;

constexpr double kEps = 1e-7;
constexpr IouKind kAllKinds[] = {IouKind::kIou, IouKind::kGiou, IouKind::kDiou, IouKind::kCiou};

struct Pair {
  double a[4], b[4];
};

template <typename T>
T value(IouKind kind, const Pair& pair, bool xywh, T eps = T(kEps)) {
  T a[4], b[4];
  std::copy(pair.a, pair.a + 4, a);
  std::copy(pair.b, pair.b + 4, b);
  const Box<T> first = make_box(a, xywh, eps);
  const Box<T> second = make_box(b, xywh, eps);
  switch (kind) {
    case IouKind::kIou:
      return box_iou<IouKind::kIou>(first, second, eps);
    case IouKind::kGiou:
      return box_iou<IouKind::kGiou>(first, second, eps);
    case IouKind::kDiou:
      return box_iou<IouKind::kDiou>(first, second, eps);
    case IouKind::kCiou:
      break;
  }
  return box_iou<IouKind::kCiou>(first, second, eps);
}

template <typename T>
struct Gradients {
  T value;
  T a[4], b[4];
};

template <typename T>
Gradients<T> gradients(IouKind kind, const Pair& pair, bool xywh, T grad = T(1), T eps = T(kEps)) {
  T a[4], b[4];
  std::copy(pair.a, pair.a + 4, a);
  std::copy(pair.b, pair.b + 4, b);
  const Box<T> first = make_box(a, xywh, eps);
  const Box<T> second = make_box(b, xywh, eps);
  Box<T> grad_a{}, grad_b{};
  Gradients<T> result;
  switch (kind) {
    case IouKind::kIou:
      result.value = box_iou_grad<IouKind::kIou>(first, second, eps, grad, grad_a, grad_b);
      break;
    case IouKind::kGiou:
      result.value = box_iou_grad<IouKind::kGiou>(first, second, eps, grad, grad_a, grad_b);
      break;
    case IouKind::kDiou:
      result.value = box_iou_grad<IouKind::kDiou>(first, second, eps, grad, grad_a, grad_b);
      break;
    case IouKind::kCiou:
      result.value = box_iou_grad<IouKind::kCiou>(first, second, eps, grad, grad_a, grad_b);
      break;
  }
  fold_box_grad(grad_a, xywh, result.a);
  fold_box_grad(grad_b, xywh, result.b);
  return result;
}

std::vector<Pair> random_pairs(int count, bool xywh) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> centre(10, 50), side(1, 30);
  std::vector<Pair> pairs(count);
  for (Pair& pair : pairs) {
    for (double* box : {pair.a, pair.b}) {
      const double x = centre(random), y = centre(random), w = side(random), h = side(random);
      const double as_xywh[4] = {x, y, w, h};
      const double as_xyxy[4] = {x, y, x + w, y + h};
      std::copy_n(xywh ? as_xywh : as_xyxy, 4, box);
    }
  }
  return pairs;
}

// Counts unit cells: exact for boxes with integer corners.
double rasterised_iou(const Pair& p) {
  int both = 0, any = 0;
  for (int x = 0; x < 40; ++x) {
    for (int y = 0; y < 40; ++y) {
      const bool in_a = x >= p.a[0] && x < p.a[2] && y >= p.a[1] && y < p.a[3];
      const bool in_b = x >= p.b[0] && x < p.b[2] && y >= p.b[1] && y < p.b[3];
      both += in_a && in_b;
      any += in_a || in_b;
    }
  }
  return static_cast<double>(both) / any;
}

TEST(BoxMath, IouEqualsCountedCells) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> low(0, 19), side(1, 20);
  for (int i = 0; i < 300; ++i) {
    Pair p;
    for (double* box : {p.a, p.b}) {
      box[0] = low(random);
      box[1] = low(random);
      box[2] = box[0] + side(random);
      box[3] = box[1] + side(random);
    }
    ASSERT_NEAR(value<double>(IouKind::kIou, p, false), rasterised_iou(p), 1e-6);
    ASSERT_NEAR(value<float>(IouKind::kIou, p, false), rasterised_iou(p), 1e-6);
  }
}

TEST(BoxMath, HandComputedKinds) {
  // a = [0,0,2,2], b = [1,0,5,2]: I = 2, U = 10, hull 5 x 2, centres (1,1) and (3,1).
  const Pair p{{0, 0, 2, 2}, {1, 0, 5, 2}};
  const double pi = std::acos(-1.0);
  const double iou = 0.2;
  EXPECT_NEAR(value<double>(IouKind::kIou, p, false), iou, 1e-6);
  EXPECT_NEAR(value<double>(IouKind::kGiou, p, false), iou - (10.0 - 10.0) / 10.0, 1e-6);
  EXPECT_NEAR(value<double>(IouKind::kDiou, p, false), iou - 4.0 / 29.0, 1e-6);
  const double v = 4 / (pi * pi) * std::pow(std::atan(2.0) - std::atan(1.0), 2);
  EXPECT_NEAR(value<double>(IouKind::kCiou, p, false), iou - 4.0 / 29.0 - v * v / (1 - iou + v), 1e-6);
  // Apart: the hull is 6 x 1, of which 2 are covered.
  const Pair apart{{0, 0, 1, 1}, {5, 0, 6, 1}};
  EXPECT_NEAR(value<double>(IouKind::kGiou, apart, false), 0.0 - 4.0 / 6.0, 1e-6);
}

TEST(BoxMath, LayoutsAgree) {
  for (const Pair& p : random_pairs(200, true)) {
    Pair corners;
    for (auto [from, to] : {std::pair{p.a, corners.a}, std::pair{p.b, corners.b}}) {
      to[0] = from[0] - from[2] / 2;
      to[1] = from[1] - from[3] / 2;
      to[2] = from[0] + from[2] / 2;
      to[3] = from[1] + from[3] / 2;
    }
    for (const IouKind kind : kAllKinds) {
      ASSERT_NEAR(value<double>(kind, p, true), value<double>(kind, corners, false), 1e-6);
    }
  }
}

// CIoU's alpha is a constant by definition: hold it at the unperturbed boxes' value for the numeric derivative.
double value_with_alpha_held(IouKind kind, const Pair& pair, const Pair& at, bool xywh) {
  if (kind != IouKind::kCiou) return value<double>(kind, pair, xywh);
  const auto terms = [&](const Pair& p) {
    return iou_terms<IouKind::kCiou>(make_box(p.a, xywh, kEps), make_box(p.b, xywh, kEps), kEps);
  };
  const IouTerms<double> t = terms(pair);
  const double v = 4 / std::pow(std::acos(-1.0), 2) * t.angle * t.angle;
  return t.iou - t.distance / t.diagonal - terms(at).alpha * v;
}

TEST(BoxMath, GradientsEqualCentralDifferences) {
  constexpr double kStep = 1e-6;
  for (const bool xywh : {true, false}) {
    for (const Pair& p : random_pairs(100, xywh)) {
      for (const IouKind kind : kAllKinds) {
        const Gradients<double> g = gradients<double>(kind, p, xywh, 1.7);
        ASSERT_DOUBLE_EQ(g.value, value<double>(kind, p, xywh));
        for (int c = 0; c < 8; ++c) {
          Pair up = p, down = p;
          (c < 4 ? up.a : up.b)[c % 4] += kStep;
          (c < 4 ? down.a : down.b)[c % 4] -= kStep;
          const double numeric =
              1.7 * (value_with_alpha_held(kind, up, p, xywh) - value_with_alpha_held(kind, down, p, xywh)) /
              (2 * kStep);
          ASSERT_NEAR((c < 4 ? g.a : g.b)[c % 4], numeric, 1e-7) << "kind " << int(kind) << " coordinate " << c;
        }
      }
    }
  }
}

TEST(BoxMath, FloatFollowsDouble) {
  for (const Pair& p : random_pairs(500, true)) {
    for (const IouKind kind : kAllKinds) {
      const Gradients<double> exact = gradients<double>(kind, p, true);
      const Gradients<float> single = gradients<float>(kind, p, true);
      ASSERT_NEAR(single.value, exact.value, 2e-6);
      for (int c = 0; c < 4; ++c) {
        ASSERT_NEAR(single.a[c], exact.a[c], 2e-6);
        ASSERT_NEAR(single.b[c], exact.b[c], 2e-6);
      }
    }
  }
}

TEST(BoxMath, EqualCornersShareTheGradient) {
  // Equal boxes: each corner's share of intersection and hull is one half, so by symmetry both gradients are equal.
  const Pair p{{3, 4, 7, 9}, {3, 4, 7, 9}};
  for (const IouKind kind : kAllKinds) {
    const Gradients<double> g = gradients<double>(kind, p, false);
    for (int c = 0; c < 4; ++c) EXPECT_DOUBLE_EQ(g.a[c], g.b[c]);
  }
  EXPECT_EQ(min_share(1.0, 2.0), 1.0);
  EXPECT_EQ(min_share(2.0, 2.0), 0.5);
  EXPECT_EQ(min_share(2.0, 1.0), 0.0);
}

TEST(BoxMath, TouchingBoxesPassTheClamp) {
  // They share the edge x = 2: the overlap's width is 0, and a clamp passes the gradient at its bound.
  const Pair p{{0, 0, 2, 2}, {2, 0, 4, 2}};
  const Gradients<double> g = gradients<double>(IouKind::kIou, p, false);
  EXPECT_GT(g.a[2], 0.2);   // moving a's right edge right makes them overlap
  EXPECT_LT(g.b[0], -0.2);  // moving b's left edge right undoes it
}

// DIoU-pytorch-detectron #19: NaN gradient at zero height.
TEST(BoxMath, DegenerateBoxesStayFinite) {
  const double flats[][4] = {{5, 5, 4, 0},     {5, 5, 0, 4},         {5, 5, 0, 0},  {5, 5, 1e-20, 0},
                             {5, 5, 0, 1e-20}, {5, 5, 1e-30, 1e-30}, {5, 5, -2, 3}, {0, 0, 0, 0}};
  const double others[][4] = {{6, 5, 3, 2}, {5, 5, 4, 0}, {5, 5, 0, 0}, {9, 9, 0, 5}};
  for (const auto& flat : flats) {
    for (const auto& other : others) {
      Pair p;
      std::copy_n(flat, 4, p.a);
      std::copy_n(other, 4, p.b);
      for (const IouKind kind : kAllKinds) {
        const Gradients<float> g = gradients<float>(kind, p, true);
        EXPECT_TRUE(std::isfinite(g.value));
        for (int c = 0; c < 4; ++c) EXPECT_TRUE(std::isfinite(g.a[c]) && std::isfinite(g.b[c])) << "kind " << int(kind);
      }
    }
  }
}

// Rounding lifts the IoU of equal float boxes above 1; 1 - iou + eps can then be 0 and alpha 0/0.
TEST(BoxMath, EqualFloatBoxesAreNeverNan) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> side(0.01f, 640.0f);
  int above = 0;
  for (int i = 0; i < 200000; ++i) {
    Pair p{{side(random), side(random), side(random), side(random)}, {}};
    std::copy_n(p.a, 4, p.b);
    above += value<float>(IouKind::kIou, p, true) > 1.0f;
    const Gradients<float> g = gradients<float>(IouKind::kCiou, p, true);
    ASSERT_TRUE(std::isfinite(g.value));
    for (int c = 0; c < 4; ++c) ASSERT_TRUE(std::isfinite(g.a[c]));
  }
  EXPECT_GT(above, 100) << "this test no longer meets the case that it is for";
}

TEST(BoxMath, NanStaysNan) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const bool xywh : {true, false}) {
    for (const IouKind kind : kAllKinds) {
      for (int c = 0; c < 8; ++c) {
        Pair p{{5, 5, 8, 8}, {6, 6, 9, 9}};
        (c < 4 ? p.a : p.b)[c % 4] = nan;
        EXPECT_TRUE(std::isnan(value<float>(kind, p, xywh))) << "kind " << int(kind) << " coordinate " << c;
      }
    }
  }
  EXPECT_TRUE(std::isnan(nan_min(nan, 1.0)) && std::isnan(nan_min(1.0, nan)));
  EXPECT_TRUE(std::isnan(nan_max(nan, 1.0)) && std::isnan(nan_max(1.0, nan)));
}

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

// --- broadcast.h
// ------------------------------------------------------------------------------------------------------

TEST(BroadcastPlan, MergesWhatIsContiguous) {
  BroadcastPlan<2> plan;
  ASSERT_TRUE(plan.push(7, {4, 4}));
  ASSERT_TRUE(plan.push(5, {28, 28}));
  EXPECT_EQ(plan.dims, 1);
  EXPECT_EQ(plan.size[0], 35);
  ASSERT_TRUE(plan.push(3, {140, 0}));  // the second operand is broadcast
  EXPECT_EQ(plan.dims, 2);
  EXPECT_EQ(plan.numel, 105);
  ASSERT_TRUE(plan.push(1, {999, 999}));
  EXPECT_EQ(plan.dims, 2);
}

TEST(BroadcastPlan, OffsetsEqualNestedLoops) {
  BroadcastPlan<3> plan;
  ASSERT_TRUE(plan.push(3, {4, 0, 1}));
  ASSERT_TRUE(plan.push(5, {0, 4, 3}));
  ASSERT_TRUE(plan.push(2, {100, 20, 15}));
  int64_t index = 0;
  for (int64_t k = 0; k < 2; ++k) {
    for (int64_t j = 0; j < 5; ++j) {
      for (int64_t i = 0; i < 3; ++i, ++index) {
        int64_t offset[3];
        broadcast_offsets(plan, index, offset);
        ASSERT_EQ(offset[0], 4 * i + 100 * k);
        ASSERT_EQ(offset[1], 4 * j + 20 * k);
        ASSERT_EQ(offset[2], index);
      }
    }
  }
}

// int32 element counts: apex #1825, pytorch #101760.
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
