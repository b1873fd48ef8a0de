// ByteTrack and BoT-SORT predict, associate twice and update the lists. Other trackers override some of these steps.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/track/assignment.h"
#include "core/track/kalman.h"
#include "core/track/overlap.h"

namespace torch_fastdet::core {

struct TrackOptions {
  double match_limit;          // cost limit of the first association
  float high, low, new_track;  // scores: minima of the first stage and of new tracks; the second takes those above low
  int64_t buffer;              // frames for which a lost track is kept
  bool fuse_score;             // the first cost is 1 - iou * score
};

// Hold one frame's rows of x1 y1 x2 y2 ... score class, or of x y width height angle ... score class.
struct FrameDetections {
  const float* rows;
  int64_t count, columns;
  bool rotated = false;
  bool centred = false;  // rows hold x y width height, not x1 y1 x2 y2
};

// Hold the appearance distance of each track and detection, or NaN. Rows are the tracked and then the lost tracks.
struct Appearances {
  const float* costs = nullptr;
  int64_t columns = 0;
  float near = 0;  // largest cost of the boxes for which the appearance counts
};

enum class TrackStatus : uint8_t { kNew = 0, kTracked = 1, kLost = 2, kRemoved = 3 };

struct Track {
  TrackBox box;
  int64_t id = 0, frame = 0, start = 0;                     // frame: that of the last detection; start: of the first
  int64_t length = 0;                                       // detections since it was born or found again
  int64_t index = 0;                                        // index of the last detection in its frame
  int removals = 0;                                         // number of its entries in the list of removed tracks
  double angle = std::numeric_limits<double>::quiet_NaN();  // of a rotated box, whose width is at least its height
  float score = 0, cls = 0;
  TrackStatus status = TrackStatus::kNew;
  bool confirmed = false;
  KalmanState state;  // its last member is only read if the camera has moved
};

class Tracker {
 public:
  // A row holds mean, covariance, id, frame, start, length, index, score, class, status, confirmed, angle.
  static constexpr int kFilterColumns = 8 + 64, kStateColumns = kFilterColumns + 10;
  enum List { kTrackedList, kLostList, kRemovedList };

  explicit Tracker(bool xywh) : filter_(xywh) {}
  virtual ~Tracker() = default;

  void reset() {
    frame_ = last_id_ = 0, mixed_ = false;
    tracks_.clear(), free_slots_.clear(), tracked_.clear(), lost_.clear(), removed_.clear(), removed_now_.clear();
  }
  // Let `solve` choose among equally good assignments. For each row of costs it returns the column, or -1.
  using Solve = std::function<std::vector<int>(const std::vector<float>& costs, int rows, double limit)>;
  void break_ties_by(Solve solve) { solve_ = std::move(solve); }

  int64_t frame() const { return frame_; }
  int64_t last_id() const { return last_id_; }
  int64_t removed_now() const { return removed_now_.size(); }  // removed in the last update; last in the list

  // motion: the camera's motion since the last frame, or null. recovered: dropped duplicates, if the tracker uses them.
  void update(const FrameDetections& detections, const TrackOptions& options, const CameraMotion* motion,
              const FrameDetections& recovered = {}, const Appearances& looks = {}) {
    options_ = options, looks_ = looks;
    if (looks.costs) {
      look_row_.resize(tracks_.size());
      int row = 0;
      for (const std::vector<int>* list : {&tracked_, &lost_})
        for (int s : *list) look_row_[s] = row++;
    }
    rotated_ = detections.rotated;
    frame_++;
    split(detections, recovered);
    found_.clear(), born_.clear(), missed_.clear(), removed_now_.clear(), pool_.clear(), loose_.clear();
    for (int s : tracked_) (follows(tracks_[s]) ? pool_ : loose_).push_back(s);
    pool_.insert(pool_.end(), lost_.begin(), lost_.end());
    advance(motion);
    associate();
    suppress();
    start_tracks();
    remove_stale();
    merge_lists();
    drop_duplicates();
  }

  int64_t confirmed_count() const {
    return std::count_if(tracked_.begin(), tracked_.end(), [&](int s) { return shown(tracks_[s]); });
  }

  int64_t output_columns() const { return rotated_ ? 9 : 8; }

  void write(float* out) const {
    for (int s : tracked_) {
      const Track& t = tracks_[s];
      if (!shown(t)) continue;
      if (rotated_) {
        const RotatedCandidate<float> r = rotated_box(t);
        for (float value : {r.box.x, r.box.y, r.box.width, r.box.height, r.angle}) *out++ = value;
      } else {
        for (float value : {t.box.x1, t.box.y1, t.box.x2, t.box.y2}) *out++ = value;
      }
      for (float value : {static_cast<float>(t.id), t.score, t.cls, static_cast<float>(t.index)}) *out++ = value;
    }
  }

  int64_t size(List list) const {
    return list == kRemovedList ? removed_.size() : list == kLostList ? lost_.size() : tracked_.size();
  }

  int64_t columns() const { return kStateColumns + past_columns(); }

  // Write size(list) rows of columns(). The past of a removed track is not kept.
  void save(List list, double* out) const {
    std::fill(out, out + size(list) * columns(), 0.0);
    if (list == kRemovedList) {
      for (const Removed& r : removed_) save(r.track, out), out += columns();
      return;
    }
    for (int s : list == kLostList ? lost_ : tracked_) {
      save_past(s, save(tracks_[s], out));
      out += columns();
    }
  }

  // Continue from saved lists: rows[list] holds count[list] rows, or is nullptr to keep the current list.
  void load(const double* const rows[3], const int64_t count[3], int64_t frame, int64_t last_id) {
    std::array<std::vector<double>, 3> saved;
    std::array<std::vector<Track>, 3> next;
    bool mixed = false;
    for (List list : {kTrackedList, kLostList, kRemovedList}) {
      saved[list].resize(size(list) * columns());
      if (rows[list])
        saved[list].assign(rows[list], rows[list] + count[list] * columns());
      else
        save(list, saved[list].data());
      for (size_t at = 0; at < saved[list].size(); at += columns()) next[list].push_back(load(&saved[list][at], mixed));
    }
    reset();
    frame_ = frame, last_id_ = last_id, mixed_ = mixed;
    for (List list : {kTrackedList, kLostList}) {
      const double* past = saved[list].data() + kStateColumns;
      for (const Track& track : next[list]) {
        load_past(add(list == kLostList ? lost_ : tracked_, track), past);
        past += columns();
      }
    }
    for (const Track& track : next[kRemovedList]) note_removed(track);
  }

 protected:
  struct Detection {
    float left, top, w, h, score, cls;
    double angle;
    int64_t index;
    TrackBox upright() const { return {left, top, w + left, h + top}; }  // ignores the angle
  };
  struct Stage {  // the detections of one association
    std::vector<Detection> rows;
    TrackShapes shapes;
    int size() const { return static_cast<int>(rows.size()); }
  };
  struct Removed {
    int slot;  // the track's slot when it was removed
    Track track;
  };
  static constexpr size_t kRemembered = 1000;  // removed tracks
  static constexpr size_t kReserved = 16;      // initial capacity of a track's past
  static constexpr double kPi = 3.14159265358979323846;
  static constexpr double kLowLimit = 0.5, kUnconfirmedLimit = 0.7;
  static constexpr float kDuplicate = 0.15f;

  KalmanFilter filter_;
  TrackOptions options_{};
  Appearances looks_{};        // of this frame
  std::vector<int> look_row_;  // indexed by slot
  int64_t frame_ = 0, last_id_ = 0;
  bool mixed_ = false;         // the camera has moved
  bool rotated_ = false;       // of this frame's boxes
  std::vector<Track> tracks_;  // indexed by slot
  std::vector<int> free_slots_, tracked_, lost_;
  std::deque<Removed> removed_;
  // These hold one frame's data; they are members to reuse their memory.
  Stage high_, low_;
  std::vector<int> pool_, loose_, rest_, found_, born_, missed_, removed_now_;
  TrackShapes tracked_shapes_, lost_shapes_;
  std::vector<uint8_t> used_, drop_;
  std::vector<int> fresh_;  // detections that may start a track, in order
  TrackShapes near_;        // the boxes of fresh_, then those of tracks
  BoxIndex index_;
  SparseAssignment assignment_;
  Solve solve_;
  std::vector<int> columns_;
  std::vector<float> costs_;

  struct Costs {
    bool fuse;
    float operator()(int, int, float overlap, const Detection& d) const {
      const float cost = 1.f - overlap;
      return fuse ? 1.f - (1.f - cost) * d.score : cost;
    }
  };

  float look(int slot, const Detection& d) const { return looks_.costs[look_row_[slot] * looks_.columns + d.index]; }

  // Return a pair's cost, or its appearance cost if the boxes are near and it is smaller.
  float with_looks(float cost, int slot, float overlap, const Detection& d) const {
    return !looks_.costs || 1.f - overlap > looks_.near ? cost : std::min(cost, look(slot, d));
  }

  auto looking_costs(const std::vector<int>& slots) const {
    return [this, &slots, costs = Costs{options_.fuse_score}](int i, int j, float overlap, const Detection& d) {
      return with_looks(costs(i, j, overlap, d), slots[i], overlap, d);
    };
  }

  // Other trackers override these steps.
  virtual bool usable(const Detection& d) const {
    return d.w > 0 && d.h > 0 && std::isfinite(d.w) && std::isfinite(d.h) && std::isfinite(d.left) &&
           std::isfinite(d.top) && (!rotated_ || std::isfinite(d.angle));
  }
  virtual bool follows(const Track& t) const { return t.confirmed; }
  virtual double doubt(const Detection&) const { return 1; }  // factor of the detection's variance
  virtual bool shown(const Track& t) const { return t.confirmed; }
  virtual bool stale(int slot) const { return frame_ - tracks_[slot].frame > options_.buffer; }
  virtual void advance(const CameraMotion* motion) {
    for (int s : pool_) predict(tracks_[s]);
    if (motion) move(*motion);
  }
  // Unconfirmed tracks come before low scores, which they do not use, so that the high scores' index serves twice.
  virtual void associate() {
    associate_high();
    recover();
    associate_unconfirmed();
    associate_low();
  }
  virtual void first_match() { match(pool_, high_, options_.match_limit, false, looking_costs(pool_)); }
  virtual void recover() {}   // runs after the first stage
  virtual void suppress() {}  // sets used_ for detections that must not start a track
  virtual void started(int) {}
  virtual int64_t past_columns() const { return 0; }  // number of columns of a tracker's own data of a track
  virtual void save_past(int, double*) const {}
  virtual void load_past(int, const double*) {}

  virtual void split(const FrameDetections& d, const FrameDetections&) {
    high_.rows.clear(), low_.rows.clear();
    for (int64_t i = 0; i < d.count; i++) {
      const float score = d.rows[(i + 1) * d.columns - 2];
      if (score >= options_.high)
        add(high_, d, i, i);
      else if (score > options_.low && score < options_.high)
        add(low_, d, i, i);
    }
  }

  void add(Stage& stage, const FrameDetections& frame, int64_t row, int64_t index) const {
    const float* box = frame.rows + row * frame.columns;
    float x = box[0], y = box[1], w = box[2], h = box[3];
    double angle = std::numeric_limits<double>::quiet_NaN();
    if (rotated_)
      angle = box[4];
    else if (!frame.centred)
      x = (box[0] + box[2]) / 2, y = (box[1] + box[3]) / 2, w = box[2] - box[0], h = box[3] - box[1];
    if (rotated_ && w < h) std::swap(w, h), angle += kPi / 2;
    const Detection made{static_cast<float>(static_cast<double>(x) - static_cast<double>(w) / 2),
                         static_cast<float>(static_cast<double>(y) - static_cast<double>(h) / 2),
                         w,
                         h,
                         box[frame.columns - 2],
                         box[frame.columns - 1],
                         angle,
                         index};
    if (usable(made)) stage.rows.push_back(made);
  }

  // Return how far rotated boxes reach that can match at a cost limit, or whose appearance counts.
  float reach(double limit) const {
    if (looks_.costs) limit = std::max<double>(limit, looks_.near);
    return rotated_ ? static_cast<float>(reach_scale_of(1 - limit)) : 0.f;
  }

  void place(Stage& stage, double limit) {
    const float scale = reach(limit);
    stage.shapes.clear();
    for (const Detection& d : stage.rows) {
      if (rotated_)
        stage.shapes.add({{d.left + d.w / 2, d.top + d.h / 2, d.w, d.h}, static_cast<float>(d.angle)}, scale);
      else
        stage.shapes.add(d.upright());
    }
    index_.build(stage.shapes.boxes.data(), stage.size());
  }

  void place(const std::vector<int>& slots, TrackShapes& shapes, double limit) {
    const float scale = reach(limit);
    shapes.clear();
    for (int s : slots) {
      if (rotated_)
        shapes.add(rotated_box(tracks_[s]), scale);
      else
        shapes.add(tracks_[s].box);
    }
  }

  RotatedCandidate<float> rotated_box(const Track& t) const {
    const Lanes& p = t.state.position;
    const double w = filter_.xywh() ? p[2] : p[2] * p[3], h = p[3], x = p[0] - w / 2, y = p[1] - h / 2;
    return {
        {static_cast<float>(x + w / 2), static_cast<float>(y + h / 2), static_cast<float>(w), static_cast<float>(h)},
        static_cast<float>(t.angle)};
  }

  Lanes measure(float left, float top, float w, float h) const {  // computed in float32, then widened
    const float x = left + w / 2, y = top + h / 2;
    return {{x, y, filter_.xywh() ? w : w / h, h}};
  }
  Lanes measure(const Detection& d) const { return measure(d.left, d.top, d.w, d.h); }

  WideBox corners(const Lanes& p) const {  // of a filter's position
    const double w = filter_.xywh() ? p[2] : p[2] * p[3], h = p[3], x = p[0] - w / 2, y = p[1] - h / 2;
    return {x, y, w + x, h + y};
  }

  void set_box(Track& t) const { t.box = narrow(corners(t.state.position)); }

  void predict(Track& t) const {
    if (t.status != TrackStatus::kTracked) {  // a lost track keeps its size
      t.state.velocity[3] = 0;
      if (filter_.xywh()) t.state.velocity[2] = 0;
    }
    filter_.predict(t.state, mixed_);
    set_box(t);
  }

  void move(const CameraMotion& motion) {
    mixed_ = true;
    for (const std::vector<int>* list : {&pool_, &loose_})
      for (int s : *list) {
        filter_.move(tracks_[s].state, motion, rotated_ || !filter_.xywh());
        tracks_[s].angle += motion.angle;  // NaN stays NaN
        set_box(tracks_[s]);
      }
  }

  virtual void take(int slot, const Stage& stage, int detection) {
    Track& t = tracks_[slot];
    const Detection& d = stage.rows[detection];
    filter_.correct(t.state, measure(d), mixed_, doubt(d));
    set_box(t);
    // The box is the same after half a turn, so take the angle that is nearest to the previous one.
    t.angle = d.angle - kPi * std::nearbyint((d.angle - t.angle) / kPi);
    t.length = t.status == TrackStatus::kTracked ? t.length + 1 : 0;
    t.frame = frame_, t.index = d.index, t.score = d.score, t.cls = d.cls;
    t.status = TrackStatus::kTracked, t.confirmed = true;
  }

  // Match tracks with the stage's detections, which index_ must hold. assignment_.column_of(row) holds the result.
  template <class Cost>
  void match(const std::vector<int>& rows, const Stage& stage, double limit, bool skip_used, const Cost& cost) {
    place(rows, tracked_shapes_, limit);
    match_placed(stage, limit, skip_used, cost);
  }

  template <class Cost>
  void match_placed(const Stage& stage, double limit, bool skip_used, const Cost& cost) {
    const int n = tracked_shapes_.size(), m = stage.size();
    const bool all = limit > 1;  // then boxes that do not meet are pairs, too
    const int pairs = !m ? 0 : all ? n * m : index_.collect(tracked_shapes_.boxes.data(), n);
    assignment_.begin(n, m, pairs);
    for (int k = 0; k < pairs; k++) {
      const int i = all ? k / m : index_.rows()[k], j = all ? k % m : index_.columns()[k];
      if (skip_used && used_[j]) continue;
      const float overlap = tracked_shapes_.overlap(i, stage.shapes, j);
      assignment_.edge(i, j, static_cast<double>(cost(i, j, overlap, stage.rows[j])) - limit);
    }
    assignment_.solve();
    if (!solve_ || !assignment_.tied()) return;
    columns_.clear(), costs_.clear();
    for (int j = 0; j < m; j++)
      if (!skip_used || !used_[j]) columns_.push_back(j);
    for (int i = 0; i < n; i++)
      for (int j : columns_) costs_.push_back(cost(i, j, tracked_shapes_.overlap(i, stage.shapes, j), stage.rows[j]));
    const std::vector<int> found = solve_(costs_, n, limit);
    for (int i = 0; i < n; i++) assignment_.set(i, found[i] < 0 ? -1 : columns_[found[i]]);
  }

  void associate_high() {
    used_.assign(high_.size(), 0), rest_.clear();
    place(high_, std::max(options_.match_limit, kUnconfirmedLimit));
    first_match();
    for (size_t r = 0; r < pool_.size(); r++) {
      const int s = pool_[r], j = assignment_.column_of(static_cast<int>(r));
      const bool tracked = tracks_[s].status == TrackStatus::kTracked;
      if (j >= 0) {
        if (!tracked) found_.push_back(s);
        take(s, high_, j);
        used_[j] = 1;
      } else if (tracked) {
        rest_.push_back(s);
      }
    }
  }

  void associate_unconfirmed() {
    match(loose_, high_, kUnconfirmedLimit, true, looking_costs(loose_));
    for (size_t r = 0; r < loose_.size(); r++) {
      const int s = loose_[r], j = assignment_.column_of(static_cast<int>(r));
      if (j >= 0) {
        take(s, high_, j);
        used_[j] = 1;
      } else {
        tracks_[s].status = TrackStatus::kRemoved;
        removed_now_.push_back(s);
      }
    }
  }

  int add(std::vector<int>& list, const Track& track) {
    const int s = new_slot();
    tracks_[s] = track;
    list.push_back(s);
    return s;
  }

  int new_slot() {
    if (free_slots_.empty()) {
      tracks_.emplace_back();
      return static_cast<int>(tracks_.size()) - 1;
    }
    const int s = free_slots_.back();
    free_slots_.pop_back();
    return s;
  }

  // Set used_ for detections of fresh_ that refuses(i, k) by a box k of near_, of a track or an earlier detection.
  template <class Refuses>
  void keep_apart(const Refuses& refuses) {
    const int count = static_cast<int>(fresh_.size());
    index_.build(near_.boxes.data(), near_.size());
    const int pairs = index_.collect(near_.boxes.data(), count);
    for (int i = 0, k = 0; i < count; i++) {
      bool refused = false;
      for (; k < pairs && index_.rows()[k] == i; k++) {
        const int other = index_.columns()[k];
        if (other >= count || (other < i && !used_[fresh_[other]])) refused |= refuses(i, other);
      }
      used_[fresh_[i]] = refused;
    }
  }

  void start_tracks() {
    for (int j = 0; j < high_.size(); j++) {
      const Detection& d = high_.rows[j];
      if (used_[j] || d.score < options_.new_track) continue;
      Track t;
      t.id = ++last_id_, t.frame = t.start = frame_, t.index = d.index, t.angle = d.angle, t.score = d.score,
      t.cls = d.cls;
      t.status = TrackStatus::kTracked, t.confirmed = frame_ == 1;
      filter_.start(t.state, measure(d));
      set_box(t);
      started(add(born_, t));
    }
  }

  void match_low() {
    place(low_, kLowLimit);
    match(rest_, low_, kLowLimit, false, Costs{false});
    size_t kept = 0;
    for (size_t r = 0; r < rest_.size(); r++) {
      const int s = rest_[r], j = assignment_.column_of(static_cast<int>(r));
      if (j >= 0)
        take(s, low_, j);
      else
        rest_[kept++] = s;
    }
    rest_.resize(kept);
  }

  void lose(int slot) {
    tracks_[slot].status = TrackStatus::kLost;
    missed_.push_back(slot);
  }

  virtual void associate_low() {
    match_low();
    for (int s : rest_) lose(s);
  }

  void remove_stale() {
    for (int s : lost_) {
      if (!stale(s)) continue;
      tracks_[s].status = TrackStatus::kRemoved;
      removed_now_.push_back(s);
    }
  }

  void merge_lists() {
    size_t kept = 0;
    for (int s : tracked_) {
      if (tracks_[s].status == TrackStatus::kTracked)
        tracked_[kept++] = s;
      else if (tracks_[s].status == TrackStatus::kRemoved)
        free_slots_.push_back(s);
    }
    tracked_.resize(kept);
    tracked_.insert(tracked_.end(), born_.begin(), born_.end());
    tracked_.insert(tracked_.end(), found_.begin(), found_.end());
    lost_.insert(lost_.end(), missed_.begin(), missed_.end());
    kept = 0;
    for (int s : lost_) {
      if (tracks_[s].status == TrackStatus::kTracked) continue;
      if (tracks_[s].removals)  // removed in an earlier frame; a track that is stale now stays for one more frame
        free_slots_.push_back(s);
      else
        lost_[kept++] = s;
    }
    lost_.resize(kept);
    for (int s : removed_now_) {
      tracks_[s].removals++;
      removed_.push_back({s, tracks_[s]});
    }
    while (removed_.size() > kRemembered) {
      const Removed& oldest = removed_.front();
      if (oldest.slot >= 0 && tracks_[oldest.slot].id == oldest.track.id) tracks_[oldest.slot].removals--;
      removed_.pop_front();
    }
  }

  // If a tracked and a lost track overlap, drop the one that was followed for fewer frames, on a tie the tracked one.
  void drop_duplicates() {
    if (tracked_.empty() || lost_.empty()) return;
    const int rows = static_cast<int>(tracked_.size()), columns = static_cast<int>(lost_.size());
    place(tracked_, tracked_shapes_, kDuplicate);
    place(lost_, lost_shapes_, kDuplicate);
    index_.build(lost_shapes_.boxes.data(), columns);
    const int pairs = index_.collect(tracked_shapes_.boxes.data(), rows);
    drop_.assign(rows + columns, 0);
    for (int k = 0; k < pairs; k++) {
      const int i = index_.rows()[k], j = index_.columns()[k];
      if (!(1.f - tracked_shapes_.overlap(i, lost_shapes_, j) < kDuplicate)) continue;
      const Track &tracked = tracks_[tracked_[i]], &lost = tracks_[lost_[j]];
      drop_[tracked.frame - tracked.start > lost.frame - lost.start ? rows + j : i] = 1;
    }
    keep(tracked_, drop_.data());
    keep(lost_, drop_.data() + rows);
  }

  void keep(std::vector<int>& list, const uint8_t* drop) {
    size_t kept = 0;
    for (size_t i = 0; i < list.size(); i++) {
      const int s = list[i];
      if (drop[i])
        free_slots_.push_back(s);
      else
        list[kept++] = s;
    }
    list.resize(kept);
  }

  void note_removed(const Track& track) {
    int slot = -1;
    for (const std::vector<int>* list : {&tracked_, &lost_})
      for (int s : *list)
        if (tracks_[s].id == track.id) tracks_[s].removals++, slot = s;
    removed_.push_back({slot, track});
  }

  // Visit the parts of the 8x8 covariance; rows and columns 0 to 3 are positions, 4 to 7 velocities.
  template <class Visit>
  static void visit_covariance(Visit visit) {
    Lanes Covariance::*const parts[2][2] = {{&Covariance::pp, &Covariance::pv}, {&Covariance::vp, &Covariance::vv}};
    for (int a = 0; a < 2; a++)
      for (int b = 0; b < 2; b++)
        for (int i = 0; i < 4; i++) {
          visit(8 * (4 * a + i) + 4 * b + i, &KalmanState::own, parts[a][b], i);
          visit(8 * (4 * a + i) + 4 * b + (i ^ 1), &KalmanState::cross, parts[a][b], i);
        }
  }

  static double* save(const KalmanState& state, double* out) {
    std::copy(state.position.lane, state.position.lane + 4, out);
    std::copy(state.velocity.lane, state.velocity.lane + 4, out + 4);
    visit_covariance([&](int place, auto block, auto part, int i) { out[8 + place] = (state.*block.*part)[i]; });
    return out + kFilterColumns;
  }

  static double* save(const Track& t, double* out) {
    const double rest[] = {double(t.id),        double(t.frame), double(t.start), double(t.length),
                           double(t.index),     double(t.score), double(t.cls),   double(static_cast<int>(t.status)),
                           double(t.confirmed), double(t.angle)};
    return std::copy(rest, rest + 10, save(t.state, out));
  }

  // Set `mixed` if the camera has moved before.
  static KalmanState load_state(const double* row, bool& mixed) {
    KalmanState state;
    std::copy(row, row + 4, state.position.lane);
    std::copy(row + 4, row + 8, state.velocity.lane);
    std::array<bool, 64> known{};
    visit_covariance([&](int place, auto block, auto part, int i) {
      (state.*block.*part)[i] = row[8 + place];
      known[place] = true;
      mixed = mixed || (block == &KalmanState::cross && row[8 + place] != 0);
    });
    for (int k = 0; k < 64; k++)
      if (!known[k] && row[8 + k] != 0) throw std::invalid_argument("a covariance that no tracker makes");
    return state;
  }

  Track load(const double* row, bool& mixed) const {
    Track t;
    t.state = load_state(row, mixed);
    const double* rest = row + kFilterColumns;
    t.id = rest[0], t.frame = rest[1], t.start = rest[2], t.length = rest[3], t.index = rest[4];
    t.score = rest[5], t.cls = rest[6], t.status = static_cast<TrackStatus>(int(rest[7])), t.confirmed = rest[8] != 0;
    t.angle = rest[9];
    set_box(t);
    return t;
  }
};

}  // namespace torch_fastdet::core
