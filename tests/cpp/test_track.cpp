// Compare the trackers' candidates with all pairs and the assignment with all assignments, and resume trackers from
// saved lists. tests/test_trackers.py compares tracks with the original trackers'.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "core/track/mutual.h"
#include "core/track/observation.h"
#include "core/track/occlusion.h"

namespace torch_fastdet::core {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
using Matrix = std::vector<std::vector<double>>;

Matrix zeros(size_t rows, size_t columns) {
  return Matrix(rows, std::vector<double>(columns));
}

TEST(Track, IndexFindsEveryPairThatMeets) {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> place(-50, 500), size(0, 90);
  for (int count : {1, 2, 31, 33, 64, 65, 129, 300}) {
    auto boxes = [&](int n) {
      std::vector<TrackBox> made;
      for (int i = 0; i < n; i++) {
        const float x = place(random), y = place(random);
        made.push_back({x, y, x + size(random), y + size(random)});
      }
      return made;
    };
    const std::vector<TrackBox> columns = boxes(count), rows = boxes(count + 3);
    BoxIndex index;
    for (int twice = 0; twice < 2; twice++) {
      index.build(columns.data(), count);
      const int pairs = index.collect(rows.data(), count + 3);
      std::set<std::pair<int, int>> found;
      for (int k = 0; k < pairs; k++) {
        ASSERT_TRUE(k == 0 || index.rows()[k - 1] <= index.rows()[k]);
        ASSERT_TRUE(found.insert({index.rows()[k], index.columns()[k]}).second);
      }
      for (int i = 0; i < count + 3; i++)
        for (int j = 0; j < count; j++)
          ASSERT_TRUE(found.count({i, j}) || !(track_iou(rows[i], rows[i].area(), columns[j], columns[j].area()) > 0))
              << count << " " << i << " " << j;
    }
  }
}

TEST(Track, RotatedBoxesThatOverlapReachEachOther) {
  std::mt19937 random(6);
  std::uniform_real_distribution<float> place(0, 300), size(4, 90), angle(-3, 3);
  for (double threshold : {0.15, 0.5, 0.85}) {
    TrackShapes rows, columns;
    for (TrackShapes* shapes : {&rows, &columns})
      for (int i = 0; i < 200; i++)
        shapes->add({{place(random), place(random), size(random), size(random)}, angle(random)},
                    static_cast<float>(reach_scale_of(threshold)));
    BoxIndex index;
    index.build(columns.boxes.data(), columns.size());
    std::set<std::pair<int, int>> found;
    for (int k = index.collect(rows.boxes.data(), rows.size()) - 1; k >= 0; k--)
      found.insert({index.rows()[k], index.columns()[k]});
    int overlaps = 0;
    for (int i = 0; i < rows.size(); i++)
      for (int j = 0; j < columns.size(); j++) {
        if (!(probiou(rows.rotated[i], columns.rotated[j]) > threshold)) continue;
        overlaps++;
        ASSERT_TRUE(found.count({i, j}));
        ASSERT_EQ(rows.overlap(i, columns, j), probiou(rows.rotated[i], columns.rotated[j]));
      }
    EXPECT_GT(overlaps, 0);
  }
}

double best_sum(const Matrix& cost, double limit, size_t row, std::vector<bool>& used) {
  if (row == cost.size()) return 0;
  double best = best_sum(cost, limit, row + 1, used);
  for (size_t j = 0; j < used.size(); j++) {
    if (used[j] || std::isnan(cost[row][j])) continue;
    used[j] = true;
    best = std::min(best, cost[row][j] - limit + best_sum(cost, limit, row + 1, used));
    used[j] = false;
  }
  return best;
}

int ways_to(double sum, const Matrix& cost, double limit, size_t row, std::vector<bool>& used) {
  if (row == cost.size()) return std::abs(sum) < 1e-12;
  int ways = ways_to(sum, cost, limit, row + 1, used);
  for (size_t j = 0; j < used.size(); j++) {
    if (used[j] || std::isnan(cost[row][j])) continue;
    used[j] = true;
    ways += ways_to(sum - (cost[row][j] - limit), cost, limit, row + 1, used);
    used[j] = false;
  }
  return ways;
}

TEST(Track, AssignmentIsTheBestOfAll) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> uniform(0, 1);
  SparseAssignment assignment;
  for (int trial = 0; trial < 600; trial++) {
    const int n = trial % 6, m = trial / 6 % 6;
    const double limit = trial % 2 ? 0.8 : 0.5;
    Matrix cost = zeros(n, m);
    assignment.begin(n, m, n * m);
    for (int i = 0; i < n; i++)
      for (int j = 0; j < m; j++) {
        cost[i][j] = trial % 3 ? uniform(random) : std::round(4 * uniform(random)) / 4;
        if (uniform(random) < 0.1) cost[i][j] = kNaN;
        assignment.edge(i, j, cost[i][j] - limit);
      }
    assignment.solve();
    double sum = 0;
    std::set<int> columns;
    for (int i = 0; i < n; i++) {
      const int j = assignment.column_of(i);
      if (j < 0) continue;
      ASSERT_TRUE(columns.insert(j).second);
      ASSERT_LE(cost[i][j], limit);
      sum += cost[i][j] - limit;
    }
    std::vector<bool> used(m);
    ASSERT_NEAR(sum, best_sum(cost, limit, 0, used), 1e-12) << trial;
    ASSERT_EQ(assignment.tied(), ways_to(sum, cost, limit, 0, used) > 1) << trial;
  }
}

TEST(Track, InfiniteCostsAreNoPairs) {
  SparseAssignment assignment;
  assignment.begin(2, 2, 4);
  for (int i = 0; i < 2; i++) {
    assignment.edge(i, 0, -0.5);
    assignment.edge(i, 1, -std::numeric_limits<double>::infinity());
  }
  assignment.solve();
  EXPECT_EQ(assignment.column_of(0), 0);
  EXPECT_EQ(assignment.column_of(1), -1);
}

using Rows = std::vector<std::array<float, 6>>;  // x1 y1 x2 y2 score class
const TrackOptions kOptions = {0.8, 0.25f, 0.1f, 0.25f, 3, true};

// Return rows of x1 y1 x2 y2 id score class index.
std::vector<std::array<float, 8>> update(Tracker& tracker, const Rows& rows, const CameraMotion* motion = nullptr) {
  const FrameDetections frame{rows.empty() ? nullptr : rows[0].data(), static_cast<int64_t>(rows.size()), 6};
  tracker.update(frame, kOptions, motion);
  std::vector<std::array<float, 8>> out(tracker.confirmed_count());
  if (!out.empty()) tracker.write(out[0].data());
  return out;
}
std::array<float, 6> box(float x, float score = 0.9f) {
  return {x, 10, x + 40, 60, score, 1};
}

const ObservationOptions kObserving = {3, 0.2f, false};
const OcclusionOptions kOccluding = {5, 3, 1.1, 0.5, 4, 0.7f, 8, 0.7};

const MutualOptions kMutual = {0.2f, 0.4f, 0.05, 0.1f, 0.05, 0, 0.55f, 3, 0.5f};

void expect_continues(Tracker& a, Tracker& b, bool moving) {
  std::mt19937 random(11);
  std::uniform_real_distribution<float> uniform(0, 1);
  const CameraMotion motion{{{0.999, -0.01}, {0.01, 1.001}}, {1, -1}, 1, 0};
  for (int t = 0; t < 60; t++) {
    Rows rows;
    for (int k = 0; k < 20; k++) {
      const float x = 60.f * k + 3 * uniform(random) + t, y = 40.f * (k % 3);
      if (uniform(random) < 0.7f) rows.push_back({x, y, x + 45, y + 60, uniform(random), 0});
    }
    const CameraMotion* m = moving && t > 20 && t % 2 ? &motion : nullptr;
    ASSERT_EQ(update(a, rows, m), update(b, rows, m)) << t;
    std::vector<double> saved[3];
    const double* data[3];
    int64_t count[3];
    for (Tracker::List list : {Tracker::kTrackedList, Tracker::kLostList, Tracker::kRemovedList}) {
      saved[list].resize(1 + b.size(list) * b.columns());
      b.save(list, saved[list].data());
      data[list] = list == Tracker::kRemovedList && t % 2 ? nullptr : saved[list].data();
      count[list] = b.size(list);
    }
    if (t % 3) b.load(data, count, b.frame(), b.last_id());
  }
  std::vector<double> row(b.columns());
  row[8 + 2] = 1;  // x depends on the width, which no tracker makes
  const double* data[3] = {row.data(), nullptr, nullptr};
  const int64_t count[3] = {1, 0, 0};
  EXPECT_THROW(b.load(data, count, 1, 1), std::invalid_argument);
  const Rows next = {box(0), box(300)};
  EXPECT_EQ(update(a, next), update(b, next));
}

TEST(Track, ContinuesFromSavedLists) {
  Tracker moving[2] = {Tracker(true), Tracker(true)};
  expect_continues(moving[0], moving[1], true);
  ObservationTracker observing[2] = {ObservationTracker(kObserving), ObservationTracker(kObserving)};
  expect_continues(observing[0], observing[1], true);
  OcclusionTracker occluding[2] = {OcclusionTracker(kOccluding), OcclusionTracker(kOccluding)};
  expect_continues(occluding[0], occluding[1], false);
  MutualTracker mutual[2] = {MutualTracker(kMutual), MutualTracker(kMutual)};
  expect_continues(mutual[0], mutual[1], true);
}

}  // namespace
}  // namespace torch_fastdet::core
