// Compare the CPU loops of the v8 losses with kernels/v8_*_problem.h, and test their arithmetic.
#include <gtest/gtest.h>

#include "core/v8_loss/v8_keypoint_loops.h"
#include "core/v8_loss/v8_loss_loops.h"
#include "core/v8_loss/v8_mask_loops.h"
#include "kernels/backwards.h"
#include "kernels/dtypes.h"
#include "kernels/v8_keypoint_problem.h"
#include "kernels/v8_loss_problem.h"
#include "kernels/v8_mask_problem.h"
#include "kernels/v8_obb_problem.h"

namespace torch_fastdet::core {
namespace {

template <typename T>
struct Loops {
  static constexpr bool kFaults = false;
  static int64_t slot_blocks(const V8LossParams&) { return 0; }
  static int64_t class_blocks(const V8LossParams&) { return 0; }
  static bool forward(const V8LossParams& params, int64_t count) {
    v8_loops::forward<T>(params, count, in_order);
    return true;
  }
  static bool backward(const V8LossBackwardParams& params) {
    v8_loops::backward<T>(params, in_order);
    return true;
  }
};

TEST(V8LossLoops, RandomHeadsAndTargets) {
  for_each_seed(24, {DType::kFloat32, DType::kFloat64}, [](auto zero, uint64_t seed, DType dtype) {
    v8_problem::check<Loops<decltype(zero)>, decltype(zero)>(seed, dtype);
  });
}

template <typename T>
struct MaskLoops {
  static bool forward(const V8MaskLossParams& params, int64_t count) {
    v8_loops::mask_forward<T>(params, count, in_order);
    return true;
  }
  static bool backward(const V8MaskLossBackwardParams& params) {
    v8_loops::mask_backward<T>(params, in_order);
    return true;
  }
};

TEST(V8MaskLossLoops, RandomBoxesAndMasks) {
  for_each_seed(24, {DType::kFloat32, DType::kFloat64}, [](auto zero, uint64_t seed, DType dtype) {
    v8_mask_problem::check<MaskLoops<decltype(zero)>, decltype(zero)>(seed, dtype);
  });
}

template <typename T>
struct KeypointLoops {
  static bool forward(const V8KeypointLossParams& params) {
    v8_loops::keypoint_forward<T>(params);
    return true;
  }
  static bool backward(const V8KeypointLossBackwardParams& params) {
    v8_loops::keypoint_backward<T>(params);
    return true;
  }
};

TEST(V8KeypointLossLoops, RandomKeypoints) {
  for_each_seed(24, {DType::kFloat32, DType::kFloat64}, [](auto zero, uint64_t seed, DType dtype) {
    v8_keypoint_problem::check<KeypointLoops<decltype(zero)>, decltype(zero)>(seed, dtype);
  });
}

template <typename T>
struct ObbLoopsBackwards : v8_obb_problem::Loops<T> {
  static bool forward(const V8ObbLossParams& params, int64_t count) {
    v8_loops::obb_forward<T>(params, count, backwards);
    return true;
  }
  static bool backward(const V8ObbLossBackwardParams& params) {
    v8_loops::obb_backward<T>(params, backwards);
    return true;
  }
};

TEST(V8ObbLossLoops, ThreadsInAnyOrder) {
  for (uint64_t seed = 0; seed < rounds(24) && !HasFailure(); ++seed) {
    v8_obb_problem::check<ObbLoopsBackwards<double>, v8_obb_problem::Loops<double>, double>(seed, DType::kFloat64);
  }
}

// The gradient of probiou equals differences, and its value is right for equal boxes.
TEST(V8ObbMath, GradientOfProbiou) {
  Random random(3);
  for (int round = 0; round < 50; ++round) {
    const auto draw = [&] {
      return V8Obb<double>{random.normal(), random.normal(), 2 + std::abs(random.normal()) * 3,
                           2 + std::abs(random.normal()) * 3, 2 * random.normal()};
    };
    const V8Obb<double> box = draw(), other = draw();
    const auto value = [&](const V8Obb<double>& b) {
      return v8_probiou(b, v8_gaussian(b, 0.01), other, v8_gaussian(other, 0.01)).value;
    };
    V8Obb<double> by{};
    const auto g = v8_gaussian(box, 0.01), h = v8_gaussian(other, 0.01);
    v8_probiou_gradient(v8_probiou(box, g, other, h), box, g, h, 1.0, by);
    const double* gradient = &by.x;
    for (int k = 0; k < 5; ++k) {
      V8Obb<double> more = box, less = box;
      (&more.x)[k] += 1e-6, (&less.x)[k] -= 1e-6;
      EXPECT_NEAR(gradient[k], (value(more) - value(less)) / 2e-6, 1e-6) << k;
    }
  }
  const V8Obb<double> box{3, 4, 5, 6, 1};
  // The distance is clamped to 1e-7, and as much is added under the root.
  EXPECT_NEAR(v8_probiou(box, v8_gaussian(box, 0.), box, v8_gaussian(box, 0.)).value, 1 - std::sqrt(2e-7), 1e-9);
}

// If a predicted box has a NaN distance, the target around it ranks it first, and the loss is NaN as in eager code;
// elsewhere the box does no harm.
TEST(V8LossMath, KeysPutNanFirstAndZeroNowhere) {
  EXPECT_GT(v8_key(std::nanf(""), 5), v8_key(INFINITY, 0));
  EXPECT_GT(v8_key(0.5f, 3), v8_key(0.5f, 4));
  EXPECT_EQ(v8_key(0.0f, 1), 0u);
  EXPECT_EQ(v8_key_index(v8_key(1.0f, 12345)), 12345);
  EXPECT_TRUE(std::isnan(v8_ordered(v8_order(std::nan("")))));
  EXPECT_GT(v8_order(std::nan("")), v8_order(INFINITY));
}

}  // namespace
}  // namespace torch_fastdet::core
