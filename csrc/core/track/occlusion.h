// FastTracker (2025): ByteTrack whose tracks wait where another track has covered them. A covered track goes back to
// where it was some frames before, slower and larger, and is lost later than others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/track/tracker.h"

namespace torch_fastdet::core {

struct OcclusionOptions {
  int64_t velocity_back, position_back;  // matches to go back; 0: to the oldest that is kept
  double enlarge, dampen;                // factors of the height and of the velocity
  int64_t grace;                         // frames for which a covered track is not lost
  float cover;                           // covered: more than this part of the area by one other track
  int64_t window;                        // frames after being covered for which a lost track is kept
  double suppress;                       // overlap with a track from which a detection starts none; 1: never
};

class OcclusionTracker : public Tracker {
 public:
  explicit OcclusionTracker(const OcclusionOptions& options)
      : Tracker(false),
        kind_(options),
        kept_(static_cast<size_t>(std::max(options.velocity_back, options.position_back)) + 4) {}

  bool takes_rotated() const override { return false; }

 protected:
  struct Past {
    std::vector<StillState> states;  // after the newest matches: a ring
    size_t matches = 0;
    int64_t unmatched = 0, hidden = 0, covered_at = -1;  // in frames
    bool covered = false, recently = false;
  };
  OcclusionOptions kind_;
  size_t kept_;
  std::vector<Past> pasts_;  // by slot
  TrackShapes active_;
  std::vector<int> fresh_;  // detections that may start a track
  std::vector<uint8_t> covered_;

  bool shown(const Track& t) const override { return t.confirmed && t.frame == frame_; }

  bool stale(int slot) const override {
    const Past& past = pasts_[slot];
    return Tracker::stale(slot) && !(past.recently && frame_ - past.covered_at <= kind_.window);
  }

  Past& new_past(int slot) {
    if (pasts_.size() < tracks_.size()) pasts_.resize(tracks_.size());
    Past& past = pasts_[slot];
    past = {std::move(past.states)};
    past.states.clear();
    return past;
  }

  void remember(Past& past, const StillState& state) const {
    const size_t place = past.matches++ % kept_;
    if (place < past.states.size())
      past.states[place] = state;
    else
      past.states.push_back(state);
  }

  // The state that many matches ago; nullptr if there were fewer.
  const StillState* state_before(const Past& past, int64_t back) const {
    const size_t held = past.states.size(), steps = back ? static_cast<size_t>(back) : held;
    return steps > held ? nullptr : &past.states[(past.matches - steps) % kept_];
  }

  void started(int slot) override { remember(new_past(slot), tracks_[slot].state); }

  void take(int slot, const Stage& stage, int detection) override {
    Past& past = pasts_[slot];
    if (tracks_[slot].status != TrackStatus::kTracked) past.covered_at = -1, past.recently = false;
    Tracker::take(slot, stage, detection);
    past.unmatched = past.hidden = 0, past.covered = false;
    remember(past, tracks_[slot].state);
  }

  void associate_low() override {
    match_low();
    find_covered();
    for (size_t r = 0; r < rest_.size(); r++) {
      const int s = rest_[r];
      Past& past = pasts_[s];
      past.unmatched++;
      if (covered_[r] && !past.covered) {
        past.covered = past.recently = true, past.covered_at = frame_, past.hidden = 0;
        step_back(tracks_[s], past);
      }
      if (past.covered) past.hidden++;
      if (frame_ - past.covered_at > kind_.window) past.recently = false;
      if (past.unmatched > 2 && !(past.covered && past.hidden <= kind_.grace)) lose(s);
    }
  }

  // Sets covered_ for the tracks of rest_ that a track which was followed into this frame covers.
  void find_covered() {
    covered_.assign(rest_.size(), 0);
    active_.clear(), tracked_shapes_.clear();
    for (size_t k = 0; k + lost_.size() < pool_.size(); k++)
      if (tracks_[pool_[k]].frame == frame_) active_.add(tracks_[pool_[k]].box);
    for (int s : rest_) tracked_shapes_.add(tracks_[s].box);
    if (rest_.empty()) return;
    index_.build(tracked_shapes_.boxes.data(), tracked_shapes_.size());
    const int pairs = index_.collect(active_.boxes.data(), active_.size());
    for (int k = 0; k < pairs; k++) {
      const int i = index_.columns()[k];
      const float inside = track_intersection(tracked_shapes_.boxes[i], active_.boxes[index_.rows()[k]]);
      if (inside / (tracked_shapes_.areas[i] + 1e-7f) > kind_.cover) covered_[i] = 1;
    }
  }

  void step_back(Track& track, const Past& past) const {
    KalmanState& state = track.state;
    const Lanes velocity = state.velocity;
    if (const StillState* before = state_before(past, kind_.position_back)) state = {*before, {}};
    const StillState* before = state_before(past, kind_.velocity_back);
    const double d = kind_.dampen;
    state.velocity = (before ? before->velocity : velocity) * Lanes{{d, d, d, d}};
    state.position[3] *= kind_.enlarge;
    set_box(track);
  }

  void suppress() override {
    fresh_.clear(), tracked_shapes_.clear(), active_.clear();
    for (int j = 0; j < high_.size(); j++)
      if (!used_[j] && high_.rows[j].score >= options_.new_track)
        fresh_.push_back(j), tracked_shapes_.add(high_.shapes.boxes[j]);
    if (kind_.suppress >= 1 || fresh_.empty()) return;
    for (const std::vector<int>* list : {&tracked_, &found_})
      for (int s : *list)
        if (tracks_[s].status == TrackStatus::kTracked) active_.add(tracks_[s].box);
    const TrackShapes& fresh = tracked_shapes_;
    index_.build(fresh.boxes.data(), fresh.size());
    int pairs = index_.collect(active_.boxes.data(), active_.size());
    for (int k = 0; k < pairs; k++) {
      const int i = index_.columns()[k];
      if (active_.overlap(index_.rows()[k], fresh, i) >= static_cast<float>(kind_.suppress)) used_[fresh_[i]] = 1;
    }
    pairs = index_.collect(fresh.boxes.data(), fresh.size());
    for (int k = 0; k < pairs; k++) {  // in the order in which they start tracks
      const int i = index_.columns()[k], j = index_.rows()[k];
      if (i < j && !used_[fresh_[i]] && overlap_of_new(fresh.boxes[i], fresh.boxes[j]) >= kind_.suppress)
        used_[fresh_[j]] = 1;
    }
  }

  static double overlap_of_new(const TrackBox& a, const TrackBox& b) {
    auto area = [](const TrackBox& box) { return (double(box.x2) - box.x1) * (double(box.y2) - box.y1); };
    const double w = std::min(a.x2, b.x2) - double(std::max(a.x1, b.x1));
    const double h = std::min(a.y2, b.y2) - double(std::max(a.y1, b.y1));
    const double inside = std::max(w, 0.) * std::max(h, 0.);
    return inside / (area(a) + area(b) - inside + 1e-7);
  }

  // unmatched, hidden, covered at, covered, recently, the number of states, the states from the oldest.
  static constexpr int kCounts = 6;
  int64_t past_columns() const override { return kCounts + kFilterColumns * static_cast<int64_t>(kept_); }

  void save_past(int slot, double* out) const override {
    const Past& past = pasts_[slot];
    const size_t held = past.states.size();
    for (double value : {double(past.unmatched), double(past.hidden), double(past.covered_at), double(past.covered),
                         double(past.recently), double(held)})
      *out++ = value;
    for (size_t back = held; back; back--) out = save(KalmanState{past.states[(past.matches - back) % kept_], {}}, out);
  }

  void load_past(int slot, const double* in) override {
    Past& past = new_past(slot);
    past.unmatched = in[0], past.hidden = in[1], past.covered_at = in[2], past.covered = in[3] != 0,
    past.recently = in[4] != 0;
    bool mixed = false;
    for (int64_t k = 0; k < in[5]; k++) remember(past, load_state(in + kCounts + k * kFilterColumns, mixed));
  }
};

}  // namespace torch_fastdet::core
