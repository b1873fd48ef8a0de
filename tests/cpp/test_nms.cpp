// Compare the arithmetic of post-processing with double precision, and test its decisions at their edges and the GPU's
// plan.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/common/exact_math_avx2.h"
#include "core/nms/candidates.h"
#include "core/nms/nms_plan.h"
#include "core/nms/rotated_math.h"

namespace torch_fastdet::core {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Exp, StaysWithinTwoUlp) {
  for (float x = -86.f; x < 88.f; x += 0.00317f) {
    const double want = std::exp(static_cast<double>(x));
    EXPECT_NEAR(exp_rn(x), want, 2.5 * want * std::numeric_limits<float>::epsilon()) << "x = " << x;
  }
}

TEST(Exp, SaturatesAndKeepsNan) {
  EXPECT_EQ(exp_rn(-100.f), 0.f);
  EXPECT_EQ(exp_rn(-kInfinity), 0.f);
  EXPECT_EQ(exp_rn(89.f), kInfinity);
  EXPECT_EQ(exp_rn(kInfinity), kInfinity);
  EXPECT_EQ(exp_rn(0.f), 1.f);
  EXPECT_TRUE(std::isnan(exp_rn(std::nanf(""))));
}

#ifdef TORCH_FASTDET_AVX2
TORCH_FASTDET_AVX2 void exp_of_eight(const float* x, float* y) {
  _mm256_storeu_ps(y, exp_rn_avx2(_mm256_loadu_ps(x)));
}

TEST(Exp, EightAtATimeHaveTheSameBits) {
  if (!has_avx2()) GTEST_SKIP() << "no AVX2";
  const float ends[] = {0.f,   -0.f,   88.72f,    88.73f,     -86.9f,       -86.91f,
                        1e30f, -1e30f, kInfinity, -kInfinity, std::nanf("")};
  std::vector<float> values(std::begin(ends), std::end(ends));
  for (float x = -90; x < 90; x += 0.0137f) values.push_back(x);
  values.resize((values.size() + 7) / 8 * 8);
  for (size_t i = 0; i < values.size(); i += 8) {
    float got[8];
    exp_of_eight(&values[i], got);
    for (size_t j = 0; j < 8; ++j) {
      const float want = exp_rn(values[i + j]);
      EXPECT_EQ(float_bits(got[j]), float_bits(want)) << "x = " << values[i + j];
    }
  }
}
#endif

TEST(Sigmoid, IsMonotonicAndSaturates) {
  float last = 0;
  for (float x = -80.f; x < 80.f; x += 0.0131f) {
    const float value = sigmoid(x);
    EXPECT_GE(value, last) << "x = " << x;
    EXPECT_NEAR(value, 1 / (1 + std::exp(-static_cast<double>(x))), 4e-7 * value);
    last = value;
  }
  EXPECT_EQ(sigmoid(-kInfinity), 0.f);
  EXPECT_EQ(sigmoid(kInfinity), 1.f);
}

CornerBox<float> box(float x1, float y1, float x2, float y2) {
  return {x1, y1, x2, y2};
}

TEST(Overlap, OfProperBoxesIsFourComparisons) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> side(-3, 9);
  for (int i = 0; i < 20000; ++i) {
    float v[8];
    for (float& x : v) x = static_cast<float>(side(random));
    const auto a = box(v[0], v[1], v[2], v[3]), b = box(v[4], v[5], v[6], v[7]);
    EXPECT_EQ(meets(a, b), proper_boxes_meet(proper_or_void(a), proper_or_void(b)));
  }
}

TEST(Log, StaysWithinTwoUlp) {
  for (double x = 1.2e-38; x < 3e38; x *= 1.0007) {
    const float value = static_cast<float>(x);
    const double want = std::log(static_cast<double>(value));
    const float unit =
        std::nextafter(std::abs(static_cast<float>(want)), INFINITY) - std::abs(static_cast<float>(want));
    EXPECT_LE(std::abs(log_rn(value) - want), 2 * unit) << value;
  }
  EXPECT_TRUE(std::isnan(log_rn(-1.f)) && std::isnan(log_rn(NAN)));
  EXPECT_EQ(log_rn(static_cast<float>(INFINITY)), static_cast<float>(INFINITY));
}

TEST(Direction, IsTheNearestFloat) {
  for (double x = -200; x < 200; x += 0.00317) {
    const float angle = static_cast<float>(x);
    const auto d = direction_of(angle);
    EXPECT_EQ(d.cosine, static_cast<float>(std::cos(static_cast<double>(angle)))) << angle;
    EXPECT_EQ(d.sine, static_cast<float>(std::sin(static_cast<double>(angle)))) << angle;
    const auto exact = direction_of(x);
    EXPECT_NEAR(exact.cosine, std::cos(x), 1e-14);
    EXPECT_NEAR(exact.sine, std::sin(x), 1e-14);
  }
  for (const float far : {1e6f, -3e20f, 3e38f}) {
    const auto d = direction_of(far);
    EXPECT_NEAR(d.cosine * d.cosine + d.sine * d.sine, 1, 1e-6);
  }
  EXPECT_TRUE(std::isnan(direction_of(NAN).cosine) && std::isnan(direction_of(INFINITY).sine));
}

// The cheap test may only skip pairs that the formula skips.
TEST(Rotated, NearHoldsForWhateverOverlaps) {
  std::mt19937 engine(0);
  std::uniform_real_distribution<float> unit(0, 1);
  int overlapping = 0, skipped = 0;
  for (int i = 0; i < 400000; ++i) {
    const float threshold = i % 5 ? 0.05f + 0.9f * unit(engine) : 1e-4f;
    const float scale = static_cast<float>(reach_scale_of(threshold));
    const auto random_box = [&] {
      const float width = std::exp(6 * unit(engine) - 1), ratio = std::exp(5 * unit(engine) - 2.5f);
      return RotatedCandidate<float>{{20 * unit(engine), 20 * unit(engine), width, width * ratio}, 7 * unit(engine)};
    };
    const auto a = place_rotated(random_box(), 0.f, scale), b = place_rotated(random_box(), 0.f, scale);
    const bool overlap = probiou(a, b) > threshold, near = rotated_boxes_near(a, b);
    overlapping += overlap;
    skipped += !near;
    ASSERT_TRUE(near || !overlap) << i;
  }
  EXPECT_GT(overlapping, 10000);
  EXPECT_GT(skipped, 10000);
  const auto nothing = no_rotated_box<float>();
  const auto flat = place_rotated(RotatedCandidate<float>{{0, 0, 0, 0}, 0}, 0.f, 1.f);
  EXPECT_FALSE(rotated_boxes_near(nothing, nothing) || rotated_boxes_near(nothing, flat));
  EXPECT_TRUE(rotated_boxes_overlap(flat, flat, 0.99f));  // to stock, too, boxes without sides are all alike
}

NmsPlan plan(int64_t anchors, int64_t classes, bool multi_label, int64_t max_det = 300, int64_t max_nms = 30000,
             int64_t shared = 232448, DType dtype = DType::kFloat16, int64_t images = 32) {
  CandidateSource source;
  source.images = images;
  source.anchors = anchors;
  source.classes = classes;
  source.dtype = dtype;
  NmsOptions options;
  options.multi_label = multi_label;
  options.max_detections = max_det;
  options.max_candidates = max_nms;
  return plan_nms(source, options, shared);
}

TEST(Plan, NeverCutsWhatFits) {
  const NmsPlan p = plan(25200, 80, false);
  EXPECT_FALSE(p.cuts);
  EXPECT_EQ(p.capacity, 25200);
  EXPECT_EQ(p.merges, 0);
}

TEST(Plan, WorkspaceIsBoundedByTheCapacity) {  // no N x N matrix
  const NmsPlan p = plan(25200, 80, true);
  EXPECT_TRUE(p.cuts);
  EXPECT_GE(p.capacity, 30000);
  EXPECT_LE(p.capacity, 40000);
  EXPECT_LT(p.bytes, size_t{32} * (40000 * 8 + 20000));
  EXPECT_LT(plan(4000000, 80, true).bytes, size_t{32} * (40000 * 8 + 20000));
}

TEST(Plan, LevelsCoverEveryBitOfAKeyOnce) {
  for (const DType dtype : {DType::kFloat16, DType::kFloat64}) {
    const NmsPlan p = plan(25200, 80, true, 300, 30000, 232448, dtype);
    const int score_bits = dtype == DType::kFloat64 ? 63 : 31;
    int parent = 32 + score_bits, covered = 0;
    for (int i = 0; i < p.levels; ++i) {
      EXPECT_EQ(p.level[i].parent_shift, parent);
      EXPECT_LE(p.level[i].width, kHistogramBits);
      EXPECT_LE(p.level[i].shift + p.level[i].width, parent);
      covered += p.level[i].width;
      parent = p.level[i].shift;
    }
    EXPECT_EQ(parent, 0);
    EXPECT_EQ(covered, score_bits + 21);  // 25,200 * 80 pairs take 21 bits
  }
}

TEST(Plan, RunsFitTheSharedMemoryOfEveryDevice) {
  for (const int64_t shared : {65536, 101376, 166912, 232448}) {
    for (const DType dtype : {DType::kFloat16, DType::kFloat64}) {
      for (const int64_t max_nms : {100, 30000, 100000, 1000000}) {
        const NmsPlan p = plan(400000, 80, true, 300, max_nms, shared, dtype, 1);
        EXPECT_LE(p.merged_runs, kMergedRuns);
        EXPECT_LE(suppress_shared_bytes(dtype == DType::kFloat64, p.merged_runs), shared);
        EXPECT_GE(p.merged_runs * (p.tile << p.merges), p.capacity);
      }
    }
  }
}

}  // namespace
}  // namespace torch_fastdet::core
