// The trackers' core: the filter against 8x8 matrices, candidates against all pairs, the assignment against all
// assignments, and what happens to tracks in small scenes.
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

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
using Matrix = std::vector<std::vector<double>>;

Matrix zeros(size_t rows, size_t columns) {
  return Matrix(rows, std::vector<double>(columns));
}
Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix c = zeros(a.size(), b[0].size());
  for (size_t i = 0; i < a.size(); i++)
    for (size_t j = 0; j < b[0].size(); j++)
      for (size_t k = 0; k < b.size(); k++) c[i][j] += a[i][k] * b[k][j];
  return c;
}
Matrix operator+(Matrix a, const Matrix& b) {
  for (size_t i = 0; i < a.size(); i++)
    for (size_t j = 0; j < a[0].size(); j++) a[i][j] += b[i][j];
  return a;
}
Matrix transposed(const Matrix& a) {
  Matrix t = zeros(a[0].size(), a.size());
  for (size_t i = 0; i < a.size(); i++)
    for (size_t j = 0; j < a[0].size(); j++) t[j][i] = a[i][j];
  return t;
}
Matrix inverse(Matrix a) {  // Gauss-Jordan with pivots
  const size_t n = a.size();
  Matrix b = zeros(n, n);
  for (size_t i = 0; i < n; i++) b[i][i] = 1;
  for (size_t k = 0; k < n; k++) {
    size_t pivot = k;
    for (size_t i = k; i < n; i++)
      if (std::abs(a[i][k]) > std::abs(a[pivot][k])) pivot = i;
    std::swap(a[k], a[pivot]), std::swap(b[k], b[pivot]);
    const double d = a[k][k];
    for (size_t j = 0; j < n; j++) a[k][j] /= d, b[k][j] /= d;
    for (size_t i = 0; i < n; i++) {
      const double f = a[i][k];
      if (i == k) continue;
      for (size_t j = 0; j < n; j++) a[i][j] -= f * a[k][j], b[i][j] -= f * b[k][j];
    }
  }
  return b;
}

// The textbook filter on 8x8 matrices.
struct NaiveFilter {
  bool xywh;
  Matrix mean = zeros(8, 1), covariance = zeros(8, 8);

  Matrix noise(double position, double velocity, double aspect, double aspect_velocity) const {
    const double w = mean[2][0], h = mean[3][0], first = xywh ? w : h;
    const double d[8] = {position * first, position * h, xywh ? position * w : aspect,          position * h,
                         velocity * first, velocity * h, xywh ? velocity * w : aspect_velocity, velocity * h};
    Matrix q = zeros(8, 8);
    for (int i = 0; i < 8; i++) q[i][i] = d[i] * d[i];
    return q;
  }
  void start(const Lanes& z) {
    for (int i = 0; i < 4; i++) mean[i][0] = z[i];
    covariance = noise(0.1, 1.0 / 16, 1e-2, 1e-5);
  }
  void predict() {
    Matrix f = zeros(8, 8);
    for (int i = 0; i < 8; i++) f[i][i] = 1, f[i % 4][i % 4 + 4] = 1;
    const Matrix q = noise(0.05, 1.0 / 160, 1e-2, 1e-5);
    mean = f * mean, covariance = f * covariance * transposed(f) + q;
  }
  void correct(const Lanes& z) {
    Matrix h = zeros(4, 8), r = zeros(4, 4), innovation = zeros(4, 1), minus = zeros(8, 8);
    const Matrix n = noise(0.05, 0, 1e-1, 0);
    for (int i = 0; i < 4; i++) h[i][i] = 1, r[i][i] = n[i][i], innovation[i][0] = z[i] - mean[i][0];
    const Matrix gain = covariance * transposed(h) * inverse(h * covariance * transposed(h) + r);
    for (int i = 0; i < 8; i++) minus[i][i] = -1;
    mean = mean + gain * innovation;
    covariance = covariance + minus * gain * h * covariance;
  }
  void move(const CameraMotion& m) {
    Matrix r = zeros(8, 8);
    for (int k = 0; k < 4; k++)
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) r[2 * k + i][2 * k + j] = k % 2 ? std::abs(m.rotation[i][j]) : m.rotation[i][j];
    mean = r * mean, covariance = r * covariance * transposed(r);
    for (int i = 0; i < 2; i++) mean[i][0] += m.translation[i];
  }
};

void expect_same(const NaiveFilter& wanted, const KalmanState& s) {
  auto near = [](double a, double b) { EXPECT_NEAR(a, b, 1e-9 * (1 + std::abs(a))); };
  const Lanes* parts[2][2][2] = {{{&s.own.pp, &s.own.pv}, {&s.own.vp, &s.own.vv}},
                                 {{&s.cross.pp, &s.cross.pv}, {&s.cross.vp, &s.cross.vv}}};
  for (int i = 0; i < 4; i++) near(wanted.mean[i][0], s.position[i]), near(wanted.mean[4 + i][0], s.velocity[i]);
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) {
      const int a = i % 4, b = j % 4;
      const bool own = a == b, cross = a == (b ^ 1);
      near(wanted.covariance[i][j], own || cross ? (*parts[cross][i / 4][j / 4])[a] : 0.0);
    }
}

TEST(Track, FilterEqualsMatrices) {
  for (bool xywh : {false, true}) {
    for (bool moving : {false, true}) {  // with a moving camera, x and y are no longer independent
      if (moving && !xywh) continue;
      std::mt19937 random(3);
      std::normal_distribution<double> normal;
      const KalmanFilter filter(xywh);
      KalmanState state;
      NaiveFilter naive{xywh};
      const Lanes first = {{100, 50, xywh ? 40 : 0.8, 50}};
      filter.start(state, first), naive.start(first);
      expect_same(naive, state);
      for (int t = 0; t < 20; t++) {
        filter.predict(state, moving), naive.predict();
        expect_same(naive, state);
        if (moving) {
          const CameraMotion motion{{{0.99, -0.1 + 0.01 * t}, {0.1, 1.01}}, {3, -4}, 1, 0};
          filter.move(state, motion, false), naive.move(motion);
          expect_same(naive, state);
        }
        const Lanes z = {{100 + 2. * t + normal(random), 50 - t + normal(random), xywh ? 40 + normal(random) : 0.8,
                          50 + normal(random)}};
        if (t % 3 != 2) filter.correct(state, z, moving), naive.correct(z);
        expect_same(naive, state);
      }
    }
  }
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
  }
}

using Rows = std::vector<std::array<float, 6>>;  // x1 y1 x2 y2 score class
const TrackOptions kOptions = {0.8, 0.25f, 0.1f, 0.25f, 3, true};

// Rows of x1 y1 x2 y2 id score class index.
std::vector<std::array<float, 8>> update(Tracker& tracker, const Rows& rows, const CameraMotion* motion = nullptr) {
  const FrameDetections frame{rows.empty() ? nullptr : rows[0].data(), static_cast<int64_t>(rows.size()), 6};
  tracker.update(frame, kOptions, motion);
  std::vector<std::array<float, 8>> out(tracker.confirmed_count());
  if (!out.empty()) tracker.write(out[0].data());
  return out;
}
std::vector<int> ids(const std::vector<std::array<float, 8>>& rows) {
  std::vector<int> found;
  for (const auto& row : rows) found.push_back(static_cast<int>(row[4]));
  return found;
}
std::array<float, 6> box(float x, float score = 0.9f) {
  return {x, 10, x + 40, 60, score, 1};
}

TEST(Track, TracksAreBornLostFoundAndRemoved) {
  for (bool xywh : {false, true}) {
    Tracker tracker(xywh);
    EXPECT_EQ(ids(update(tracker, {box(0), box(100), box(200, 0.2f)})), (std::vector<int>{1, 2}));
    EXPECT_EQ(ids(update(tracker, {box(101), box(1), box(300)})), (std::vector<int>{1, 2}));  // 3 is not confirmed yet
    EXPECT_EQ(ids(update(tracker, {box(1), box(301), box(102, 0.15f)})), (std::vector<int>{1, 2, 3}));
    EXPECT_EQ(ids(update(tracker, {box(1), box(302)})), (std::vector<int>{1, 3}));  // 2 is lost
    EXPECT_EQ(tracker.size(Tracker::kLostList), 1);
    EXPECT_EQ(ids(update(tracker, {box(302), box(1), box(102)})), (std::vector<int>{1, 3, 2}));
    for (int t = 0; t < 5; t++) EXPECT_EQ(ids(update(tracker, {box(1), box(302)})), (std::vector<int>{1, 3}));
    EXPECT_EQ(tracker.size(Tracker::kLostList), 0);
    EXPECT_GT(tracker.size(Tracker::kRemovedList), 0);
    tracker.reset();
    EXPECT_EQ(ids(update(tracker, {box(102)})), (std::vector<int>{1}));
  }
}

TEST(Track, ARotatedBoxIsTheSameAfterHalfATurn) {
  const float pi = 3.14159274f;
  for (bool xywh : {false, true}) {
    Tracker tracker(xywh);
    const float same[][3] = {{60, 30, 0.1f}, {30, 60, 0.1f + pi / 2}, {30, 60, 0.1f - pi / 2}, {60, 30, 0.1f + pi}};
    for (const auto& box : same) {
      const float row[7] = {100, 80, box[0], box[1], box[2], 0.9f, 2};
      tracker.update({row, 1, 7, true}, kOptions, nullptr);
      ASSERT_EQ(tracker.confirmed_count(), 1);
      ASSERT_EQ(tracker.output_columns(), 9);
      float out[9];
      tracker.write(out);
      const float wanted[9] = {100, 80, 60, 30, 0.1f, 1, 0.9f, 2, 0};
      for (int k = 0; k < 9; k++) EXPECT_NEAR(out[k], wanted[k], 1e-5 * (1 + std::abs(wanted[k]))) << k;
    }
    const float odd[7] = {100, 80, 60, 30, kNaN, 0.9f, 2};
    tracker.update({odd, 1, 7, true}, kOptions, nullptr);
    EXPECT_EQ(tracker.confirmed_count(), 0);
  }
}

TEST(Track, OddBoxesAreNoDetections) {
  Tracker tracker(false), plain(false);
  const float huge = 3e38f;
  const Rows odd = {{0, 0, kInf, 10, 0.9f, 0},    {-kInf, 0, kInf, 10, 0.9f, 0}, {kNaN, 0, 5, 10, 0.9f, 0},
                    {0, 0, 5, 5, kNaN, 0},        {7, 7, 7, 20, 0.9f, 0},        {9, 9, 5, 20, 0.9f, 0},
                    {-huge, 0, huge, 10, 0.9f, 0}};
  for (int t = 0; t < 4; t++) {
    Rows rows = {box(2.f * t), box(100)};
    const auto wanted = update(plain, rows);
    rows.insert(rows.end(), odd.begin(), odd.end());
    EXPECT_EQ(update(tracker, rows), wanted);
    EXPECT_EQ(wanted.size(), 2u);
  }
  // Finite, but too large for an area in float32: it must end and keep the others.
  for (int t = 0; t < 4; t++) {
    const auto rows = update(tracker, {box(2.f * t + 8), box(100), {0, 0, 2e38f, 2e38f, 0.9f, 0}});
    ASSERT_GE(rows.size(), 2u);
    EXPECT_EQ(rows[0][4], 1);
  }
}

TEST(Track, EmptyFrames) {
  Tracker tracker(true);
  for (int t = 0; t < 3; t++) EXPECT_TRUE(update(tracker, {}).empty());
  EXPECT_TRUE(update(tracker, {box(0)}).empty());  // only the first frame confirms at once
  EXPECT_EQ(ids(update(tracker, {box(0)})), (std::vector<int>{1}));
  for (int t = 0; t < 8; t++) EXPECT_TRUE(update(tracker, {}).empty());
  EXPECT_EQ(tracker.size(Tracker::kLostList), 0);
}

TEST(Track, CameraMotionMovesTracks) {
  const CameraMotion shift{{{1, 0}, {0, 1}}, {200, 0}, 1, 0};
  Tracker still(true), moved(true);
  update(still, {box(0)}), update(moved, {box(0)});
  EXPECT_TRUE(update(still, {box(200)}).empty());
  EXPECT_EQ(ids(update(moved, {box(200)}, &shift)), (std::vector<int>{1}));
}

// The looks say that two objects have changed places; they count where boxes are near, also of rotated boxes.
TEST(Track, LooksDecideWhereBoxesAreNear) {
  for (bool rotated : {false, true}) {
    for (float near : {0.5f, 0.9f}) {
      Tracker tracker(true);
      const float first[2][7] = {{20, 35, 40, 50, 0, 0.9f, 1}, {50, 35, 40, 50, 0, 0.9f, 1}};
      const float second[2][7] = {{30, 35, 40, 50, 0, 0.9f, 1}, {40, 35, 40, 50, 0, 0.9f, 1}};
      const float costs[2][2] = {{1, 0}, {0, 1}};
      std::vector<float> rows;
      for (const auto& frame : {first, second}) {
        rows.clear();
        for (int k = 0; k < 2; k++) {
          const float* b = frame[k];
          if (rotated)
            rows.insert(rows.end(), b, b + 7);
          else
            rows.insert(rows.end(), {b[0] - 20, b[1] - 25, b[0] + 20, b[1] + 25, b[5], b[6]});
        }
        const FrameDetections detections{rows.data(), 2, rotated ? 7 : 6, rotated};
        const bool later = frame == second;
        tracker.update(detections, kOptions, nullptr, {}, later ? Appearances{costs[0], 2, near} : Appearances{});
      }
      ASSERT_EQ(tracker.confirmed_count(), 2);
      float out[2][9];
      tracker.write(out[0]);
      const int columns = rotated ? 9 : 8;  // the last one is the detection's index
      const float* flat = out[0];
      EXPECT_EQ(flat[columns - 1], near > 0.8f ? 1 : 0) << rotated << near;
      EXPECT_EQ(flat[2 * columns - 1], near > 0.8f ? 0 : 1) << rotated << near;
    }
  }
}

const ObservationOptions kObserving = {3, 0.2f, false};
const OcclusionOptions kOccluding = {5, 3, 1.1, 0.5, 4, 0.7f, 8, 0.7};

TEST(Track, ALostTrackIsFoundAtItsLastObservation) {
  Tracker plain(false);
  ObservationTracker tracker(kObserving);
  for (int t = 0; t < 8; t++) update(plain, {box(12.f * t)}), update(tracker, {box(12.f * t)});
  // It stops behind something, while the filter walks on.
  for (int t = 0; t < 2; t++) EXPECT_TRUE(update(plain, {}).empty() && update(tracker, {}).empty());
  EXPECT_TRUE(update(plain, {box(90)}).empty());
  const auto found = update(tracker, {box(90)});
  ASSERT_EQ(ids(found), (std::vector<int>{1}));
  EXPECT_NEAR(found[0][0], 90, 4);
  // The filter has run through the gap slowly: it does not walk on.
  EXPECT_NEAR(update(tracker, {box(91)})[0][0], 91, 4);
}

TEST(Track, ATrackKeepsItsDirection) {
  // Two detections at the same overlap: the one ahead is nearer to the direction of the track.
  for (const float inertia : {0.f, 1.f}) {
    ObservationTracker tracker({3, inertia, false});
    for (int t = 0; t < 6; t++) update(tracker, {box(100 + 4.f * t)});
    const auto rows = update(tracker, {box(115, 0.9f), box(134, 0.9f)});
    ASSERT_FALSE(rows.empty());
    EXPECT_EQ(rows[0][7], inertia ? 1 : 0) << inertia;
  }
}

TEST(Track, LowScoresContinueATrackIfAsked) {
  for (const bool low : {false, true}) {
    ObservationTracker tracker({3, 0.2f, low});
    update(tracker, {box(0)});
    EXPECT_EQ(update(tracker, {box(1, 0.2f)}).size(), low ? 1u : 0u);
    EXPECT_EQ(tracker.size(Tracker::kLostList), low ? 0 : 1);
  }
}

TEST(Track, ACoveredTrackWaitsAndIsKeptLonger) {
  auto lost_and_gone = [](bool covered) {
    OcclusionTracker tracker(kOccluding);
    const std::array<float, 6> front = {70, 0, 180, 90, 0.9f, 1}, away = {400, 0, 510, 90, 0.9f, 1};
    for (int t = 0; t < 6; t++) EXPECT_EQ(update(tracker, {box(100), covered ? front : away}).size(), 2u);
    int lost = 0, gone = 0;
    for (int t = 1; t < 30 && !gone; t++) {
      EXPECT_EQ(ids(update(tracker, {covered ? front : away})), (std::vector<int>{2}));
      if (!lost && tracker.size(Tracker::kLostList)) lost = t;
      if (lost && !tracker.size(Tracker::kLostList)) gone = t;
    }
    return std::pair<int, int>{lost, gone};
  };
  EXPECT_EQ(lost_and_gone(false), (std::pair<int, int>{3, 5}));
  EXPECT_EQ(lost_and_gone(true), (std::pair<int, int>{5, 11}));
}

TEST(Track, ACoveredTrackGoesBackSlowerAndLarger) {
  OcclusionTracker tracker(kOccluding);
  std::vector<double> before[10];
  auto row = [&] {
    std::vector<double> rows(tracker.size(Tracker::kTrackedList) * tracker.columns());
    tracker.save(Tracker::kTrackedList, rows.data());
    return std::vector<double>(rows.begin(), rows.begin() + Tracker::kFilterColumns);
  };
  for (int t = 0; t < 10; t++) {
    update(tracker, {box(100 + 2.f * t), {60, 0, 220, 90, 0.9f, 1}});
    before[t] = row();
  }
  update(tracker, {{60, 0, 220, 90, 0.9f, 1}});
  const std::vector<double> now = row();
  for (int k = 0; k < Tracker::kFilterColumns; k++) {
    const double wanted = k >= 4 && k < 8 ? 0.5 * before[5][k] : before[7][k];
    EXPECT_EQ(now[k], k == 3 ? 1.1 * wanted : wanted) << k;
  }
}

TEST(Track, ATrackSuppressesNewOnesOnIt) {
  for (const double suppress : {0.7, 1.0}) {
    OcclusionOptions options = kOccluding;
    options.suppress = suppress;
    OcclusionTracker tracker(options);
    EXPECT_EQ(update(tracker, {box(100), box(101), box(300)}).size(), suppress < 1 ? 2u : 3u);
    update(tracker, {box(100), box(103), box(300)});
    EXPECT_EQ(tracker.size(Tracker::kTrackedList), suppress < 1 ? 2 : 3);
  }
}

const MutualOptions kMutual = {0.2f, 0.4f, 0.05, 0.1f, 0.05, 0, 0.55f, 3};

TEST(Track, ATrackIsNewUntilItIsSeenThreeTimesInARow) {
  MutualTracker tracker(kMutual);
  EXPECT_EQ(ids(update(tracker, {box(0), box(100)})), (std::vector<int>{1, 2}));  // of the first frame, all are shown
  EXPECT_EQ(ids(update(tracker, {box(1), box(300)})), (std::vector<int>{1}));     // 2 is gone at its first miss
  EXPECT_EQ(tracker.size(Tracker::kLostList), 0);
  EXPECT_EQ(ids(update(tracker, {box(2), box(300), box(100)})), (std::vector<int>{1}));
  EXPECT_EQ(ids(update(tracker, {box(3), box(300)})), (std::vector<int>{1, 3}));
  EXPECT_TRUE(update(tracker, {}).empty());
  EXPECT_EQ(tracker.size(Tracker::kLostList), 2);
  EXPECT_EQ(ids(update(tracker, {box(300), box(3)})), (std::vector<int>{1, 3}));
}

TEST(Track, LowScoresAndRecoveredDetectionsHaveAPrice) {
  for (const float price : {0.f, 0.9f}) {
    MutualOptions options = kMutual;
    options.low_price = options.recovered_price = price, options.confirmed_from = 1;
    MutualTracker tracker(options);
    update(tracker, {box(0), box(200)});
    const float again[6] = {221, 35, 40, 50, 0.8f, 1};  // x y w h
    const Rows low = {box(1, 0.2f), box(400, 0.2f)};
    tracker.update({low[0].data(), 2, 6}, kOptions, nullptr, {again, 1, 6, false, true});
    ASSERT_EQ(tracker.confirmed_count(), price ? 0 : 2);  // and a low score starts none
    std::array<std::array<float, 8>, 2> out;
    if (price) continue;
    tracker.write(out[0].data());
    EXPECT_EQ(out[0][7], 0);
    EXPECT_EQ(out[1][7], -1);
  }
}

TEST(Track, PairsMatchByMutualChoiceBelowAFallingLimit) {
  // Both tracks choose the first detection, which chooses the first track: the second one's turn comes a round later.
  for (const double step : {0.0, 0.6}) {
    MutualOptions options = kMutual;
    options.step = step, options.confirmed_from = 1;
    MutualTracker tracker(options);
    update(tracker, {box(0), box(20)});
    const auto rows = update(tracker, {box(8), box(38)});
    ASSERT_EQ(ids(rows), (std::vector<int>{1, step ? 3 : 2}));
    EXPECT_EQ(rows[0][7], 0);
    EXPECT_EQ(tracker.size(Tracker::kLostList), step ? 1 : 0);
  }
}

TEST(Track, ATrackThatIsFoundStartsAtTheFilter) {
  MutualOptions options = kMutual;
  options.confirmed_from = 1, options.lost_limit = 0.95;
  MutualTracker tracker(options);
  for (int t = 0; t < 3; t++) update(tracker, {box(0)});
  EXPECT_TRUE(update(tracker, {}).empty());
  const auto found = update(tracker, {box(27)});  // too far for the first association
  ASSERT_EQ(ids(found), (std::vector<int>{1}));
  std::vector<double> row(tracker.columns());
  tracker.save(Tracker::kTrackedList, row.data());
  const double* newest = row.data() + Tracker::kStateColumns + 9 + 6 * 3;
  EXPECT_EQ(newest[0], 5);
  EXPECT_EQ(static_cast<float>(newest[1]), found[0][0]);
  EXPECT_EQ(newest[5], 1);  // in float64
}

TEST(Track, NewTracksStartApart) {
  MutualTracker tracker(kMutual);
  update(tracker, {box(0, 0.8f), box(2), box(300), {kNaN, 0, 9, 9, 0.9f, 0}, {0, 0, kInf, 9, 0.9f, 0}});
  EXPECT_EQ(tracker.size(Tracker::kTrackedList), 4);  // of the first two, one
  update(tracker, {box(2), box(4), box(300), {kNaN, 0, 9, 9, 0.9f, 0}});
  EXPECT_EQ(tracker.size(Tracker::kTrackedList), 2);
}

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
  expect_continues(observing[0], observing[1], false);
  OcclusionTracker occluding[2] = {OcclusionTracker(kOccluding), OcclusionTracker(kOccluding)};
  expect_continues(occluding[0], occluding[1], false);
  MutualTracker mutual[2] = {MutualTracker(kMutual), MutualTracker(kMutual)};
  expect_continues(mutual[0], mutual[1], true);
}

}  // namespace
}  // namespace torch_fastdet::core
