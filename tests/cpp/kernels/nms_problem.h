// Draw random problems of non-maximum suppression. Kernels, and CPU loops in any order of threads, are compared with
// the CPU loops in order.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "backwards.h"
#include "core/nms/candidates.h"
#include "core/nms/decode.h"
#include "core/nms/nms_loops.h"
#include "core/nms/nms_plan.h"
#include "core/nms/rotated_math.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::nms_problem {

struct Problem {
  CandidateSource source;
  NmsOptions options;
  ClassFilter filter;
  int64_t shared_limit = 232448;
  std::vector<Tensor> tensors;
  std::vector<float> labels;
  std::vector<double> letterboxes;
};

// Run the CPU loops, which the Python tests compare with an oracle. `threads` of them share a single image.
inline void suppress_by_loops(const Problem& problem, const NmsOutput& output, int64_t threads,
                              const Pieces& parallel) {
  nms_loops::suppress<Halves>(problem.source, problem.options, problem.filter, output, threads, parallel);
}

// Hold what a run writes: detections, their number in each image, and their anchors.
struct Found {
  Tensor detections, letterboxes;
  std::vector<int64_t> counts, indices;

  explicit Found(const Problem& problem)
      : detections(wide(problem), {problem.source.images, problem.options.max_detections, 6 + problem.source.extra}),
        letterboxes(wide(problem), {problem.source.images, 6}),
        counts(problem.source.images, -7),
        indices(problem.source.images * problem.options.max_detections, -7),
        scales(!problem.letterboxes.empty()) {
    for (size_t i = 0; i < problem.letterboxes.size(); ++i) letterboxes.set(i, problem.letterboxes[i]);
  }
  NmsOutput output() {
    return {detections.data(), counts.data(), indices.data(), scales ? letterboxes.data() : nullptr};
  }

 private:
  bool scales;

  static DType wide(const Problem& problem) { return arithmetic_dtype(problem.source.dtype); }
};

// Return the GPU's plan and the number of kept boxes.
template <class Backend>
std::pair<NmsPlan, int64_t> check(const Problem& problem) {
  const NmsPlan plan = plan_nms(problem.source, problem.options, problem.shared_limit);
  Found got(problem), want(problem);
  EXPECT_TRUE(Backend::suppress(problem, got.output(), plan));
  suppress_by_loops(problem, want.output(), 1, in_order);
  EXPECT_EQ(got.counts, want.counts);
  EXPECT_EQ(got.indices, want.indices);
  for (int64_t i = 0; i < got.detections.numel() && !testing::Test::HasFailure(); ++i) {
    const double mine = got.detections.get(i), wanted = want.detections.get(i);
    EXPECT_TRUE(identical(mine, wanted) || mine == wanted) << "number " << i << ": " << mine << ", wanted " << wanted;
  }
  return {plan, std::accumulate(want.counts.begin(), want.counts.end(), int64_t{0})};
}

// Return a score between 0 and 1 in few steps, so that many are equal; or a special value.
inline double score(Random& random, int nasty, int64_t steps) {
  if (random.below(1000) < nasty) {
    return random.one_of({std::nan(""), std::numeric_limits<double>::infinity(), -1.0, 0.0, 1.5});
  }
  return static_cast<double>(random.below(steps + 1)) / steps;
}

inline double logit(Random& random, int nasty) {
  if (random.below(1000) < nasty) {
    return random.one_of({std::nan(""), std::numeric_limits<double>::infinity(), -100.0, 100.0});
  }
  return static_cast<double>(random.below(33)) / 4 - 4;
}

inline void fill_options(Random& random, Problem& problem) {
  NmsOptions& options = problem.options;
  const CandidateSource& source = problem.source;
  const double threshold = random.one_of({0.25, 0.001, 0.6, 0.0});
  options.confidence = rounded(source.dtype, threshold);
  options.confidence_promoted = source.dtype == DType::kFloat64 ? threshold : static_cast<float>(threshold);
  const double lowest = threshold * (1 - 1. / 128);
  options.logit_floor = std::log(lowest / (1 - lowest)) - 1e-3;
  options.iou = random.one_of({0.45, 0.0, 0.7, 1.0});
  if (source.dtype != DType::kFloat64) options.iou = static_cast<float>(options.iou);
  options.max_wh = random.one_of({7680.0, 100.0});
  options.max_detections = random.one_of({1, 7, 300, 1024});
  options.max_candidates =
      random.one_of({int64_t{1}, int64_t{100}, int64_t{30000}, std::numeric_limits<int64_t>::max()});
  options.class_rule = random.one_of({ClassRule::kOffset, ClassRule::kExact, ClassRule::kAgnostic});
  options.multi_label = source.classes > 1 && random.chance(50);
  options.nan_class_drops_anchor = random.chance(50);
  if (random.chance(25)) {
    problem.filter.active = true;
    for (int64_t c = 0; c < source.classes; ++c) {
      if (random.chance(50)) problem.filter.bits[c / 32] |= 1u << c % 32;
    }
  }
  if (random.chance(25)) {
    for (int64_t i = 0; i < source.images; ++i) {
      for (const double value : {3.0, 5.0, 0.5, 0.25, 400.0, 300.0}) problem.letterboxes.push_back(value);
    }
  }
  problem.shared_limit = random.one_of({int64_t{65536}, int64_t{101376}, int64_t{232448}});
}

inline void add_labels(Random& random, Problem& problem) {
  for (int64_t l = 1 + random.below(5); l > 0; --l) {
    const auto image = static_cast<float>(random.below(problem.source.images + 1));
    const auto box_class = static_cast<float>(random.below(problem.source.classes + 1) - (l == 3 ? 1 : 0));
    const float row[] = {image, box_class, 100, 100, static_cast<float>(10 + random.below(50)), 30};
    problem.labels.insert(problem.labels.end(), row, row + 6);
  }
  problem.source.labels = problem.labels.data();
  problem.source.label_count = static_cast<int64_t>(problem.labels.size()) / 6;
}

inline Problem prediction(Random& random, DType dtype, int64_t images, int64_t anchors, int64_t classes, bool adjacent,
                          int nasty = 5, int present = 60, int with_objectness = 60) {
  Problem problem;
  CandidateSource& source = problem.source;
  source.dtype = dtype;
  source.images = images;
  source.anchors = anchors;
  source.classes = classes;
  source.extra = random.chance(30) ? 1 + random.below(4) : 0;
  source.has_objectness = random.chance(with_objectness);
  const int64_t channels = 4 + source.has_objectness + classes + source.extra;
  const std::vector<int64_t> sizes = {images, anchors, channels};
  const std::vector<int64_t> strides =
      adjacent ? std::vector<int64_t>{anchors * channels, 1, anchors} : Tensor::dense(sizes);
  Tensor& tensor = problem.tensors.emplace_back(dtype, sizes, strides, random.below(4));
  const int64_t steps = random.chance(60) ? 32 : 1 << 20;
  for (int64_t i = 0; i < images * anchors; ++i) {
    for (int64_t c = 0; c < channels; ++c) {
      double value = score(random, nasty, steps);
      if (c < 2) value = static_cast<double>(random.below(200));
      if (c == 2 || c == 3) value = static_cast<double>(random.below(40) - (random.chance(5) ? 30 : 0));
      if (c < 4 && random.below(1000) < nasty) value = random.one_of({std::nan(""), 1e300, -1e300});
      if (c == 4 && (!random.chance(present) || i % anchors / 64 % 9 == 0)) value = 0;  // also whole warps
      tensor.set(i * channels + c, value);
    }
  }
  source.data = tensor.data();
  source.image_stride = strides[0];
  source.anchor_stride = strides[1];
  source.channel_stride = strides[2];
  return problem;
}

inline HeadMap head_map(Random& random, Problem& problem, int64_t anchors_per_cell, int64_t channels, int64_t rows,
                        int64_t columns, bool channels_last) {
  const int64_t images = problem.source.images, all = anchors_per_cell * channels;
  std::vector<int64_t> strides = {all * rows * columns, channels * rows * columns, rows * columns, columns, 1};
  if (channels_last) strides = {rows * columns * all, channels, 1, columns * all, all};
  Tensor tensor(problem.source.dtype, {images, anchors_per_cell, channels, rows, columns}, strides, random.below(3));
  for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, logit(random, 4));
  const HeadMap map{tensor.data(), strides[0], strides[1], strides[2], strides[3], strides[4]};
  problem.tensors.push_back(std::move(tensor));
  return map;
}

inline Problem heads(Random& random, CandidateLayout layout, DType dtype) {
  Problem problem;
  CandidateSource& source = problem.source;
  source.layout = layout;
  source.dtype = dtype;
  source.images = 1 + random.below(3);
  source.classes = random.one_of({1, 3, 80, 100});
  source.extra = random.chance(30) ? 3 : 0;
  source.levels = 1 + static_cast<int32_t>(random.below(3));
  const bool with_anchors = layout == CandidateLayout::kAnchorHeads, channels_last = random.chance(50);
  source.has_objectness = with_anchors;
  source.anchors_per_cell = with_anchors ? 1 + static_cast<int32_t>(random.below(3)) : 1;
  source.bins = with_anchors ? 1 : random.one_of({1, 7, 16});
  for (float& side : source.anchor_sides) side = static_cast<float>(1 + random.below(5));
  for (int32_t l = 0; l < source.levels; ++l) {
    HeadLevel& level = source.level[l];
    level.rows = 1 + static_cast<int32_t>(random.below(9));
    level.columns = 1 + static_cast<int32_t>(random.below(12));
    level.stride = 8 << l;
    level.first_anchor = source.anchors;
    const auto map = [&](int64_t channels) {
      return head_map(random, problem, source.anchors_per_cell, channels, level.rows, level.columns, channels_last);
    };
    level.boxes = map(with_anchors ? 5 + source.classes + source.extra : 4 * source.bins);
    if (!with_anchors) level.scores = map(source.classes);
    if (!with_anchors && source.extra) level.extra = map(source.extra);
    source.anchors += int64_t{level.rows} * level.columns * source.anchors_per_cell;
  }
  return problem;
}

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

// `Backend` defines what is compared: suppress(problem, output, plan) and decode(params) return whether they ran.
template <class Backend>
class Nms : public testing::Test {};

TYPED_TEST_SUITE_P(Nms);

TYPED_TEST_P(Nms, RandomPredictions) {
  for (uint64_t seed = 0; seed < rounds(48) && !this->HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    TypeParam::seed(seed);
    const int64_t anchors = random.one_of({0, 1, 31, 255, 256, 257, 600, 1100});
    const int64_t classes = random.one_of({1, 2, 7, 33, 80, 100});
    Problem problem = prediction(random, kTypes[seed % 4], 1 + random.below(3), anchors,
                                 anchors > 300 ? std::min<int64_t>(classes, 7) : classes, random.chance(50),
                                 random.one_of({0, 5}), random.one_of({5, 60, 100}));
    fill_options(random, problem);
    if (random.chance(25)) add_labels(random, problem);
    check<TypeParam>(problem);
  }
}

TYPED_TEST_P(Nms, RandomHeads) {
  for (uint64_t seed = 0; seed < rounds(40) && !this->HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    TypeParam::seed(seed);
    Problem problem = heads(random, seed % 2 ? CandidateLayout::kAnchorHeads : CandidateLayout::kAnchorFreeHeads,
                            kTypes[seed / 2 % 4]);
    fill_options(random, problem);
    check<TypeParam>(problem);
  }
}

// Rotated boxes and keypoints come from predictions and from heads.
TYPED_TEST_P(Nms, RotatedBoxes) {
  for (uint64_t seed = 0; seed < rounds(24) && !this->HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    TypeParam::seed(seed);
    const DType dtype = kTypes[seed % 4];
    Problem problem = seed % 3 ? prediction(random, dtype, 1 + random.below(2), random.one_of({1, 257, 1100}),
                                            random.one_of({1, 4}), random.chance(50), random.one_of({0, 5}), 100, 0)
                               : heads(random, CandidateLayout::kAnchorFreeHeads, dtype);
    fill_options(random, problem);
    problem.options.max_detections = random.one_of({1, 7, 300, 2000});
    problem.options.rotated = seed % 2 ? RotatedRule::kFast : RotatedRule::kGreedy;
    problem.options.reach_scale = reach_scale_of(problem.options.iou);
    if (problem.source.layout == CandidateLayout::kAnchorFreeHeads) {
      if (!problem.source.extra) continue;
      problem.source.extra_kind = random.one_of({ExtraKind::kRaw, ExtraKind::kAngleLogit});
    }
    EXPECT_TRUE(check<TypeParam>(problem).first.wide || problem.options.max_candidates < 1);
  }
}

TYPED_TEST_P(Nms, RotatedChunks) {
  for (uint64_t seed = 0; seed < rounds(2) && !this->HasFailure(); ++seed) {
    Random random(seed);
    TypeParam::seed(seed);
    Problem problem = prediction(random, DType::kFloat32, 1, 5000, 20, seed % 2, 2, 100, 0);
    fill_options(random, problem);
    problem.filter.active = problem.options.multi_label = false;
    problem.options.confidence = problem.options.confidence_promoted = 0;
    problem.options.class_rule = seed % 2 ? ClassRule::kOffset : ClassRule::kExact;
    problem.options.max_wh = 7680;
    problem.options.iou = 0.5;
    problem.options.reach_scale = reach_scale_of(0.5);
    problem.options.max_candidates = 30000;
    problem.options.max_detections = 5000;
    problem.options.rotated = seed % 2 ? RotatedRule::kFast : RotatedRule::kGreedy;
    EXPECT_GT(check<TypeParam>(problem).second, 500);
  }
}

TYPED_TEST_P(Nms, Keypoints) {
  for (uint64_t seed = 0; seed < rounds(8) && !this->HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed + 100);
    TypeParam::seed(seed);
    Problem problem = heads(random, CandidateLayout::kAnchorFreeHeads, kTypes[seed % 4]);
    fill_options(random, problem);
    problem.source.extra_kind = seed % 2 ? ExtraKind::kKeypoints : ExtraKind::kCellKeypoints;
    problem.source.keypoint_values = 3;
    check<TypeParam>(problem);
  }
}

// There is nothing to detect, or nowhere to put it.
TYPED_TEST_P(Nms, EmptyProblems) {
  Random random(0);
  for (const auto& [images, anchors, classes, max_detections, max_candidates] :
       std::vector<std::array<int64_t, 5>>{{2, 0, 3, 5, 100}, {2, 9, 0, 5, 100}, {2, 9, 3, 0, 100}, {2, 9, 3, 5, 0}}) {
    Problem problem = prediction(random, DType::kFloat32, images, anchors, classes, false);
    problem.options.max_detections = max_detections;
    problem.options.max_candidates = max_candidates;
    EXPECT_EQ(check<TypeParam>(problem).second, 0);
  }
}

// Lists of kept boxes are in device memory, chunk after chunk.
TYPED_TEST_P(Nms, WideLists) {
  for (uint64_t seed = 0; seed < rounds(4) && !this->HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    TypeParam::seed(seed);
    Problem problem =
        prediction(random, kTypes[seed % 4], 1 + seed % 2, seed % 2 ? 2600 : 6500, 30, seed / 2 % 2, 2, 95);
    fill_options(random, problem);
    problem.filter.active = problem.options.multi_label = false;
    problem.options.confidence = problem.options.confidence_promoted = 0;
    problem.options.class_rule = seed % 3 ? ClassRule::kOffset : ClassRule::kExact;
    problem.options.max_wh = 7680;
    problem.options.iou = random.one_of({0.25, 0.5});
    problem.options.max_candidates = 30000;
    problem.options.max_detections = seed % 2 ? 1030 : 10000;
    const auto [plan, kept] = check<TypeParam>(problem);
    EXPECT_TRUE(plan.wide);
    EXPECT_GT(kept, 1000);
  }
}

// There are more candidates than fit: a radix search finds the cut, which ties may extend. Class scores may exceed 1;
// every second time, all candidates that the cut leaves must be visible.
TYPED_TEST_P(Nms, CutsToTheBest) {
  for (uint64_t seed = 0; seed < rounds(8) && !this->HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    TypeParam::seed(seed);
    Problem problem = prediction(random, kTypes[seed / 2 % 4], 1 + seed % 2, 2600, 20, seed / 4 % 2,
                                 random.one_of({0, 5, 50}), 100, 80);
    fill_options(random, problem);
    if (seed % 3 == 1) add_labels(random, problem);
    problem.filter.active = false;
    problem.options.multi_label = true;
    problem.options.nan_class_drops_anchor = false;
    problem.options.confidence = problem.options.confidence_promoted = 0;
    problem.options.iou = seed % 2 ? 1 : 0.875;
    problem.options.max_candidates = seed % 2 ? random.one_of({500, 1000}) : random.one_of({500, 5000, 20000});
    problem.options.max_detections = 1000;
    EXPECT_TRUE(check<TypeParam>(problem).first.cuts);
  }
}

// There are so many anchors that a thread may take several; few or many pass, and labels follow them.
TYPED_TEST_P(Nms, ManyAnchors) {
  for (uint64_t seed = 0; seed < rounds(2) && !this->HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    TypeParam::seed(seed);
    Problem problem =
        prediction(random, DType::kFloat16, 3, 43701 + random.below(300), 2, seed % 2, 2, seed / 2 % 2 ? 3 : 40, 100);
    fill_options(random, problem);
    add_labels(random, problem);
    problem.filter.active = false;
    problem.options.max_candidates = 30000;
    problem.options.max_detections = 300;
    check<TypeParam>(problem);
  }
}

// An image has several sorted runs. The suppressing block merges them, or an earlier one if shared memory is short.
TYPED_TEST_P(Nms, ManyRuns) {
  bool merges[2] = {};
  for (uint64_t seed = 0; seed < rounds(5) && !this->HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    TypeParam::seed(seed);
    Problem problem = prediction(random, kTypes[(seed + 1) % 4], 1 + seed % 2, 11000, 1, seed % 2, 2, 90);
    fill_options(random, problem);
    problem.options.confidence = problem.options.confidence_promoted = 0;
    problem.options.iou = seed % 3 ? 0.5 : 0.9;
    problem.options.class_rule = ClassRule::kAgnostic;
    problem.options.max_candidates = 30000;
    problem.options.max_detections = seed / 2 % 2 ? 1024 : 300;
    problem.shared_limit = seed % 2 ? 0 : 232448;
    const NmsPlan plan = check<TypeParam>(problem).first;
    EXPECT_GT(plan.runs, 1);
    merges[plan.merges > 0] = true;
  }
  EXPECT_TRUE(merges[0] && merges[1]);
}

TYPED_TEST_P(Nms, DecodedHeads) {
  for (uint64_t seed = 0; seed < rounds(60) && !this->HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    TypeParam::seed(seed);
    Problem problem = heads(random, CandidateLayout::kAnchorHeads, kTypes[seed % 4]);
    CandidateSource& source = problem.source;
    const int64_t all = 5 + source.classes + source.extra;
    Tensor out(source.dtype, {source.images, source.anchors, all}, random.below(3));
    ASSERT_TRUE(TypeParam::decode({source, out.data()}));
    with_dtype<Halves>(source.dtype, [&](auto zero) {
      using T = decltype(zero);
      using Layout = AnchorHeadLayout<T>;
      for (int64_t i = 0; i < source.images * source.anchors; ++i) {
        const auto anchor = Layout::anchor(source, i / source.anchors, i % source.anchors);
        const auto box = Layout::box(source, anchor);
        const double corner[] = {box.x, box.y, box.width, box.height};
        for (int64_t c = 0; c < all && !this->HasFailure(); ++c) {
          const auto raw = Layout::channel(source, anchor, c);
          const double want = c < 4 ? corner[c] : c < 5 + source.classes ? Storage<T>::round(sigmoid(raw)) : raw;
          EXPECT_TRUE(identical(out.get(i * all + c), want)) << "row " << i << ", channel " << c;
        }
      }
    });
    EXPECT_TRUE(out.surroundings_intact());
  }
}

REGISTER_TYPED_TEST_SUITE_P(Nms, RandomPredictions, RandomHeads, RotatedBoxes, RotatedChunks, Keypoints, EmptyProblems,
                            WideLists, CutsToTheBest, ManyAnchors, ManyRuns, DecodedHeads);

}  // namespace torch_fastdet::core::nms_problem
