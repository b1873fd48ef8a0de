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
