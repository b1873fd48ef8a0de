// Compare metrics.cu with the CPU's loops (metrics_loops.h, which tests/ops/test_metrics.py compares with the
// definition): batches with labels in any order, rows past the count, both rules.
#include <gtest/gtest.h>

#include "core/metrics/metrics_loops.h"
#include "emulator.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core {
namespace {

constexpr int64_t kClasses = 3;

// Integer coordinates make equal IoUs common.
void draw_box(Random& random, float* box) {
  box[0] = static_cast<float>(random.below(8)), box[1] = static_cast<float>(random.below(8));
  box[2] = box[0] + static_cast<float>(random.below(6)), box[3] = box[1] + static_cast<float>(random.below(6));
}

template <typename T>
T* array(const Memory& memory) {
  return reinterpret_cast<T*>(memory.data());
}

struct Problem {
  int64_t images, count, labels, columns;
  Memory detections, truth, counts, overlaps;
  MatchInput in;

  explicit Problem(Random& random)
      : images(1 + random.below(3)),
        count(random.one_of({1, 5, 31, 33, 270})),
        labels(random.one_of({0, 1, 7, 33, 40})),
        columns(6 + random.below(3)),
        detections(images * count * columns * sizeof(float)),
        truth(std::max<int64_t>(labels, 1) * 6 * sizeof(float)),
        counts(images * sizeof(int64_t)),
        overlaps(std::max<int64_t>(labels, 1) * count * sizeof(float)) {
    for (int64_t i = 0; i < images; ++i) array<int64_t>(counts)[i] = random.below(count + 1);
    for (int64_t i = 0; i < images * count; ++i) {
      float* row = array<float>(detections) + i * columns;
      draw_box(random, row);
      row[4] = static_cast<float>(random.below(100)) / 100;
      row[5] = static_cast<float>(random.below(kClasses));
    }
    for (int64_t l = 0; l < labels; ++l) {
      float* row = array<float>(truth) + l * 6;
      row[0] = static_cast<float>(random.below(images)), row[1] = static_cast<float>(random.below(kClasses));
      draw_box(random, row + 2);
    }
    for (int64_t i = 0; i < labels * count; ++i) array<float>(overlaps)[i] = static_cast<float>(random.below(20)) / 20;
    in.iou = random.chance(30) ? array<float>(overlaps) : nullptr;
    in.detections = array<float>(detections), in.labels = array<float>(truth);
    in.images = images, in.count = count, in.image_stride = count * columns, in.row_stride = columns;
    in.counts = random.chance(80) ? array<int64_t>(counts) : nullptr;
    in.label_count = labels, in.label_stride = 6, in.labels_name_image = true;
    in.rule = random.chance(50) ? MatchRule::kBest : MatchRule::kGreedy;
  }
};

TEST(MetricsKernels, MatchesAsTheLoopsDo) {
  for (uint64_t seed = 0; seed < rounds(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    emulator::seed(seed);
    Problem problem(random);
    const int64_t levels = 1 + random.below(11);
    Memory thresholds(levels * sizeof(float));
    for (int64_t t = 0; t < levels; ++t) array<float>(thresholds)[t] = 0.1f + 0.08f * static_cast<float>(t);
    const int64_t results = problem.images * problem.count * levels;
    const auto run = [&](bool kernel, const Memory& correct) {
      Memory claims(std::max<int64_t>(problem.labels * levels, 1) * sizeof(int32_t));
      Memory best(problem.images * problem.count * sizeof(int32_t));
      MatchParams p;
      p.in = problem.in;
      p.thresholds = array<float>(thresholds), p.threshold_count = levels;
      p.correct = array<bool>(correct), p.claims = array<int32_t>(claims), p.best = array<int32_t>(best);
      if (kernel) {
        ASSERT_EQ(launch_match(p, nullptr), cudaSuccess);
        return;
      }
      std::fill_n(p.correct, results, false);
      for (int64_t i = 0; i < problem.images; ++i) {
        p.in.rule == MatchRule::kBest ? match_best(p, i) : match_greedy(p, i);
      }
    };
    Memory found(results), wanted(results);
    run(true, found);
    run(false, wanted);
    for (int64_t i = 0; i < results; ++i) ASSERT_EQ(array<bool>(found)[i], array<bool>(wanted)[i]) << i;
  }
}

TEST(MetricsKernels, CountConfusionAsTheLoopsDo) {
  for (uint64_t seed = 0; seed < rounds(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    emulator::seed(seed);
    Problem problem(random);
    const int64_t cells = (kClasses + 1) * (kClasses + 1);
    const auto run = [&](bool kernel, int64_t* matrix) {
      Memory claims(std::max<int64_t>(problem.labels, 1) * sizeof(uint64_t));
      Memory matched(problem.images * problem.count * sizeof(int32_t));
      ConfusionParams p;
      p.in = problem.in;
      p.confidence = 0.25f, p.iou_threshold = 0.45f, p.classes = kClasses, p.matrix = matrix;
      p.claims = array<uint64_t>(claims), p.matched = array<int32_t>(matched);
      if (kernel) {
        ASSERT_EQ(launch_confusion(p, nullptr), cudaSuccess);
        return;
      }
      for (int64_t i = 0; i < problem.images; ++i) count_confusion(p, i);
    };
    std::vector<int64_t> found(cells, 3), wanted(cells, 3);
    run(true, found.data());
    run(false, wanted.data());
    ASSERT_EQ(found, wanted);
  }
}

}  // namespace
}  // namespace torch_fastdet::core
