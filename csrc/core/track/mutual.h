// TrackTrack (2025) matches low scores and recovered detections at an extra cost, in rounds of mutual choice, and
// starts no tracks near others.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/track/tracker.h"

namespace torch_fastdet::core {

struct MutualOptions {
  float low_price, recovered_price;  // extra cost of a pair with such a detection
  double step;                       // decrease of the limit from round to round
  float score_weight;                // weight of the difference of scores
  double angle_weight;               // weight of the angle between the ways of the corners
  double lost_limit;                 // cost limit of a further association of lost tracks; 0: none
  float apart;                       // largest overlap of a new track with another track
  int64_t confirmed_from;            // detections in a row that confirm a track
  float overlap_weight;              // weight of the boxes' cost if there are looks, whose costs are already weighted
};

// Limits and prices must be at least 0 and limits at most 1, so that a pair of boxes that hardly meet never matches.
class MutualTracker : public Tracker {
 public:
  explicit MutualTracker(const MutualOptions& options) : Tracker(true), kind_(options) {}

 protected:
  static constexpr float kMeets = 0.1f;  // pairs must overlap by more than this
  static constexpr size_t kSeen = 4;
  static constexpr int kMatched = -2;
  static constexpr int64_t kBack = 3;  // frames

  struct Seen {
    int64_t frame;
    WideBox box;
    bool wide;  // float64: the filter's box, not a detection's
  };
  template <class T>
  struct Ways {  // of the upper left, lower left, upper right and lower right corners
    std::array<T, 4> x, y;
  };
  struct Past {
    std::vector<Seen> seen;  // the newest, oldest first
    Ways<float> ways{};      // means of unit vectors; zero until seen in two consecutive frames
    float score = 0;         // the score before the last
  };
  struct Pair {
    int row, column;
    float cost;
  };
  MutualOptions kind_;
  int high_count_ = 0, low_count_ = 0;  // high_ holds all detections: high scores, low scores, recovered ones
  std::vector<Past> pasts_;             // indexed by slot
  std::vector<Pair> pairs_, matches_;
  std::vector<const Seen*> origins_;  // of rows
  std::vector<int> best_of_row_, best_of_column_;

  bool usable(const Detection&) const override { return true; }
  bool follows(const Track& t) const override { return t.status == TrackStatus::kTracked; }
  bool shown(const Track& t) const override { return t.confirmed && t.frame == frame_; }
  double doubt(const Detection& d) const override { return std::max(1 - static_cast<double>(d.score), 0.05); }

  void split(const FrameDetections& detections, const FrameDetections& recovered) override {
    Tracker::split(detections, recovered);
    high_count_ = high_.size(), low_count_ = low_.size();
    high_.rows.insert(high_.rows.end(), low_.rows.begin(), low_.rows.end());
    for (int64_t i = 0; i < recovered.count; i++)
      if (recovered.rows[(i + 1) * recovered.columns - 2] > options_.high) add(high_, recovered, i, -1);
    high_.shapes.clear();  // upright even for rotated boxes
    for (const Detection& d : high_.rows) high_.shapes.add(d.upright());
  }

  void advance(const CameraMotion* motion) override {
    if (motion) move(*motion);
    for (const std::vector<int>* list : {&pool_, &loose_})
      for (int s : *list) predict(tracks_[s]);
  }

  void associate() override {
    used_.assign(high_.size(), 0);
    index_.build(high_.shapes.boxes.data(), high_.size());
    match_mutually(pool_, options_.match_limit, true);
    for (int s : pool_)
      if (tracks_[s].status == TrackStatus::kTracked && tracks_[s].frame != frame_) lose(s);
    std::fill(used_.begin() + high_count_, used_.end(), 1);
    match_mutually(loose_, options_.match_limit, false);
    for (const Pair& m : matches_)
      if (tracks_[loose_[m.row]].status == TrackStatus::kNew) born_.push_back(loose_[m.row]);
    for (int s : loose_)
      if (tracks_[s].frame != frame_) tracks_[s].status = TrackStatus::kRemoved, removed_now_.push_back(s);
    if (!kind_.lost_limit) return;
    rest_.clear();
    for (int s : lost_)
      if (tracks_[s].status == TrackStatus::kLost) rest_.push_back(s);
    match_mutually(rest_, kind_.lost_limit, false);
  }

  // Match tracks with unused detections. matches_ holds the pairs in the order in which they are found.
  void match_mutually(const std::vector<int>& slots, double limit, bool priced) {
    find_pairs(slots, static_cast<float>(limit), priced);
    matches_.clear();
    best_of_row_.resize(slots.size()), best_of_column_.resize(high_.size());
    for (; !pairs_.empty(); limit -= kind_.step) {
      for (const Pair& pair : pairs_) best_of_row_[pair.row] = best_of_column_[pair.column] = -1;
      for (int k = 0; k < static_cast<int>(pairs_.size()); k++) {  // the first row or column wins ties
        int &row = best_of_row_[pairs_[k].row], &column = best_of_column_[pairs_[k].column];
        const float cost = pairs_[k].cost;
        if (column < 0 || cost < pairs_[column].cost) column = k;
        if (row < 0 || cost < pairs_[row].cost || (cost == pairs_[row].cost && pairs_[k].column < pairs_[row].column))
          row = k;
      }
      for (int k = 0; k < static_cast<int>(pairs_.size()); k++) {  // the pairs of a row are contiguous
        const Pair& pair = pairs_[k];
        if (best_of_row_[pair.row] != k || best_of_column_[pair.column] != k) continue;
        best_of_row_[pair.row] = kMatched;
        matches_.push_back(pair);
        const TrackStatus status = tracks_[slots[pair.row]].status;
        if (status != TrackStatus::kTracked && status != TrackStatus::kNew) found_.push_back(slots[pair.row]);
        take(slots[pair.row], high_, pair.column);
        used_[pair.column] = 1;
      }
      const float next = static_cast<float>(limit - kind_.step);
      pairs_.erase(std::remove_if(pairs_.begin(), pairs_.end(),
                                  [&](const Pair& p) {
                                    return !(p.cost < next) || used_[p.column] || best_of_row_[p.row] == kMatched;
                                  }),
                   pairs_.end());
    }
  }

  void find_pairs(const std::vector<int>& slots, float limit, bool priced) {
    pairs_.clear(), tracked_shapes_.clear(), origins_.clear();
    for (int s : slots) {
      tracked_shapes_.add(tracks_[s].box);
      const std::vector<Seen>& seen = pasts_[s].seen;
      const Seen* before = at(seen, frame_ - kBack);
      origins_.push_back(before ? before : &seen.back());
    }
    const std::vector<TrackBox>&rows = tracked_shapes_.boxes, &columns = high_.shapes.boxes;
    bool wide = false;  // one box in float64 makes NumPy compute all angles in float64
    const int count = high_.size() ? index_.collect(rows.data(), static_cast<int>(rows.size())) : 0;
    for (int k = 0; k < count; k++) {
      const int i = index_.rows()[k], j = index_.columns()[k];
      if (used_[j]) continue;
      const float overlap = tracked_shapes_.overlap(i, high_.shapes, j);
      if (!(overlap > kMeets)) continue;
      wide |= origins_[i]->wide;
      const TrackBox &a = rows[i], &b = columns[j];
      const float height =
          (std::min(a.y2, b.y2) - std::max(a.y1, b.y1)) / ((std::max(a.y2, b.y2) - std::min(a.y1, b.y1)) + 1e-9f);
      const float score = tracks_[slots[i]].score;
      const float expected = score + (score - pasts_[slots[i]].score);
      const float cost = placed_at(1 - clip(height, 0) * overlap, slots[i], high_.rows[j]) +
                         kind_.score_weight * std::abs(expected - high_.rows[j].score);
      if (priced_at(cost, j, priced) < limit) pairs_.push_back({i, j, cost});  // the angle can only add to the cost
    }
    size_t kept = 0;
    for (Pair p : pairs_) {
      const WideBox& from = origins_[p.row]->box;
      const TrackBox& to = columns[p.column];
      const Ways<float>& ways = pasts_[slots[p.row]].ways;
      const float score = high_.rows[p.column].score;
      p.cost = wide ? with_angle<double>(p.cost, from, widen(to), ways, score)
                    : with_angle<float>(p.cost, narrow(from), to, ways, score);
      p.cost = priced_at(p.cost, p.column, priced);
      if (p.cost < limit) pairs_[kept++] = p;
    }
    pairs_.resize(kept);
  }

  static float clip(float value, float least) { return std::min(std::max(value, least), 1.f); }

  float priced_at(float cost, int column, bool priced) const {
    cost = clip(cost, 0);
    if (!priced || column < high_count_) return cost;
    return clip(cost + (column < high_count_ + low_count_ ? kind_.low_price : kind_.recovered_price), 0);
  }

  float placed_at(float cost, int slot, const Detection& d) const {
    if (!looks_.costs || d.index < 0) return cost;
    const float far = look(slot, d);
    return std::isnan(far) ? cost : kind_.overlap_weight * cost + far;
  }

  static const Seen* at(const std::vector<Seen>& seen, int64_t frame) {
    for (const Seen& each : seen)
      if (each.frame == frame) return &each;
    return nullptr;
  }

  template <class T>
  static Ways<T> ways_between(const Corners<T>& from, const Corners<T>& to) {
    const T left = to.x1 - from.x1, right = to.x2 - from.x2, up = to.y1 - from.y1, down = to.y2 - from.y2;
    Ways<T> ways{{left, left, right, right}, {up, down, up, down}};
    for (int c = 0; c < 4; c++) {
      const T norm = std::sqrt(ways.x[c] * ways.x[c] + ways.y[c] * ways.y[c]) + T(1e-5);
      ways.x[c] /= norm, ways.y[c] /= norm;
    }
    return ways;
  }

  // Return the cost plus the mean angle, in half turns, between a track's ways and those to a detection.
  template <class T>
  float with_angle(float cost, const Corners<T>& from, const Corners<T>& to, const Ways<float>& ways, T score) const {
    const Ways<T> now = ways_between(from, to);
    T sum = 0;
    for (int c = 0; c < 4; c++)
      sum += std::acos(std::min(std::max(ways.x[c] * now.x[c] + ways.y[c] * now.y[c], T(-1)), T(1)));
    return static_cast<float>(cost + static_cast<T>(kind_.angle_weight) * (sum / 4 / T(kPi) * score));
  }

  void see(Past& past, const Seen& seen) {
    if (past.seen.size() == kSeen) past.seen.erase(past.seen.begin());
    past.seen.push_back(seen);
  }

  Past& new_past(int slot) {
    if (pasts_.size() < tracks_.size()) pasts_.resize(tracks_.size());
    Past& past = pasts_[slot];
    past.seen.clear(), past.seen.reserve(kSeen), past.ways = {};
    return past;
  }

  void started(int slot) override {
    Track& t = tracks_[slot];
    Past& past = new_past(slot);
    past.score = t.score;
    see(past, {frame_, corners(t.state.position), true});
    if (kind_.confirmed_from <= 1)
      t.confirmed = true;
    else
      t.status = TrackStatus::kNew;
  }

  void take(int slot, const Stage& stage, int detection) override {
    Track& t = tracks_[slot];
    Past& past = pasts_[slot];
    const bool lost = t.status != TrackStatus::kTracked && t.status != TrackStatus::kNew;
    const int64_t length = lost ? 0 : t.length + 1;
    const bool waits = t.status == TrackStatus::kNew && length + 1 < kind_.confirmed_from, shown = t.confirmed;
    past.score = t.score;
    Tracker::take(slot, stage, detection);
    t.length = length;
    if (waits) t.status = TrackStatus::kNew, t.confirmed = shown;
    if (lost) return see(past, {frame_, corners(t.state.position), true});
    const TrackBox& now = stage.shapes.boxes[detection];
    see(past, {frame_, widen(now), false});
    past.ways = {};
    for (int64_t k = 1; k <= kBack; k++) {
      const Seen* then = at(past.seen, frame_ - k);
      if (then && then->wide) add_ways(past.ways, ways_between(then->box, widen(now)), k);
      if (then && !then->wide) add_ways(past.ways, ways_between(narrow(then->box), now), k);
    }
    for (int c = 0; c < 4; c++) past.ways.x[c] /= 3, past.ways.y[c] /= 3;
  }

  template <class T>
  static void add_ways(Ways<float>& sum, const Ways<T>& ways, int64_t frames) {
    for (int c = 0; c < 4; c++) {
      sum.x[c] = static_cast<float>(sum.x[c] + ways.x[c] / static_cast<T>(frames));
      sum.y[c] = static_cast<float>(sum.y[c] + ways.y[c] / static_cast<T>(frames));
    }
  }

  // Suppress as the framework does; the last of detections with equal scores comes first.
  void suppress() override {
    fresh_.clear(), near_.clear();
    const bool alone =
        std::none_of(tracked_.begin(), tracked_.end(), [&](int s) { return tracks_[s].frame == frame_; });
    for (int j = high_.size() - 1; j >= 0; j--) {
      const bool placed = alone || !std::isnan(high_.shapes.areas[j]);
      if (!used_[j] && high_.rows[j].score > options_.new_track && placed)
        fresh_.push_back(j);
      else
        used_[j] = 1;
    }
    std::stable_sort(fresh_.begin(), fresh_.end(),
                     [&](int a, int b) { return high_.rows[a].score > high_.rows[b].score; });
    for (int j : fresh_) near_.add(high_.shapes.boxes[j]);
    for (int s : tracked_)
      if (tracks_[s].frame == frame_) near_.add(tracks_[s].box);
    if (!fresh_.empty()) keep_apart([&](int i, int other) { return near_.overlap(other, near_, i) > kind_.apart; });
  }

  // The columns are the score before the last, the ways, and rows of frame x1 y1 x2 y2 wide, padded with 0 or NaN.
  int64_t past_columns() const override { return 9 + 6 * static_cast<int64_t>(kSeen); }

  void save_past(int slot, double* out) const override {
    const Past& past = pasts_[slot];
    *out++ = past.score;
    for (int c = 0; c < 4; c++) *out++ = past.ways.x[c], *out++ = past.ways.y[c];
    for (const Seen& s : past.seen)
      for (double value : {static_cast<double>(s.frame), s.box.x1, s.box.y1, s.box.x2, s.box.y2, double(s.wide)})
        *out++ = value;
  }

  void load_past(int slot, const double* in) override {
    Past& past = new_past(slot);
    past.score = static_cast<float>(*in++);
    for (int c = 0; c < 4; c++) {
      past.ways.x[c] = static_cast<float>(*in++);
      past.ways.y[c] = static_cast<float>(*in++);
    }
    for (size_t k = 0; k<kSeen&& * in> 0; k++, in += 6)
      past.seen.push_back({static_cast<int64_t>(in[0]), {in[1], in[2], in[3], in[4]}, in[5] != 0});
    if (past.seen.empty()) past.seen.push_back({tracks_[slot].frame, corners(tracks_[slot].state.position), true});
  }
};

}  // namespace torch_fastdet::core
