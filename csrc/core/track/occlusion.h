// FastTracker (2025) is ByteTrack whose covered tracks go back some frames, slower and larger, and are lost later.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/track/tracker.h"

namespace torch_fastdet::core {

struct OcclusionOptions {
  int64_t velocity_back, position_back;  // matches to go back; 0: to the oldest state that is kept
  double enlarge, dampen;                // factors of the height and of the velocity
  int64_t grace;                         // frames for which a covered track is not lost
  float cover;                           // a track is covered if one other track covers more than this part of its area
  int64_t window;                        // frames after being covered for which a lost track is kept
  double suppress;                       // a detection that overlaps a track by this much starts no track; 1: never
};

class OcclusionTracker : public Tracker {
 public:
  explicit OcclusionTracker(const OcclusionOptions& options)
      : Tracker(false),
        kind_(options),
        kept_(static_cast<size_t>(std::max(options.velocity_back, options.position_back)) + 4) {}

 protected:
  struct Past {
    std::vector<StillState> states;  // states after the newest matches, in a ring buffer
    size_t matches = 0;
    int64_t covered_at = -1;  // the last frame in which it became covered since it was born or found; -1: none
  };
  static constexpr int64_t kUnseen = 2;  // frames for which every unmatched track is kept
  OcclusionOptions kind_;
  size_t kept_;
  std::vector<Past> pasts_;  // indexed by slot
  TrackShapes active_;
  std::vector<uint8_t> covered_;

  bool shown(const Track& t) const override { return t.confirmed && t.frame == frame_; }

  bool stale(int slot) const override {
    const int64_t covered_at = pasts_[slot].covered_at;
    return Tracker::stale(slot) && !(covered_at >= 0 && frame_ - covered_at <= kind_.window);
  }

  bool waits(int slot) const { return pasts_[slot].covered_at > tracks_[slot].frame; }

  Past& new_past(int slot) {
    if (pasts_.size() < tracks_.size()) pasts_.resize(tracks_.size());
    Past& past = pasts_[slot];
    past = {std::move(past.states)};
    past.states.clear();
    past.states.reserve(std::min(kept_, kReserved));
    return past;
  }

  void remember(Past& past, const StillState& state) const {
    const size_t place = past.matches++ % kept_;
    if (place < past.states.size())
      past.states[place] = state;
    else
      past.states.push_back(state);
  }

  // Return the state `back` matches ago, or nullptr if there were fewer.
  const StillState* state_before(const Past& past, int64_t back) const {
    const size_t held = past.states.size(), steps = back ? static_cast<size_t>(back) : held;
    return steps > held ? nullptr : &past.states[(past.matches - steps) % kept_];
  }

  void advance(const CameraMotion* motion) override {
    for (int s : pool_) {  // which take() will write
      const Past& past = pasts_[s];
      prefetch(past.states.data() + std::min(past.matches % kept_, past.states.size()));
    }
    Tracker::advance(motion);
  }

  void started(int slot) override { remember(new_past(slot), tracks_[slot].state); }

  void take(int slot, const Stage& stage, int detection) override {
    Past& past = pasts_[slot];
    if (tracks_[slot].status != TrackStatus::kTracked) past.covered_at = -1;
    Tracker::take(slot, stage, detection);
    remember(past, tracks_[slot].state);
  }

  void associate_low() override {
    match_low();
    find_covered();
    for (size_t r = 0; r < rest_.size(); r++)
      if (covered_[r] && !waits(rest_[r])) step_back(tracks_[rest_[r]], pasts_[rest_[r]]);
    for (int s : rest_) {
      const bool kept = waits(s) && frame_ - pasts_[s].covered_at < kind_.grace;
      if (frame_ - tracks_[s].frame > kUnseen && !kept) lose(s);
    }
  }

  // Set covered_ for the tracks of rest_ that are covered by a track matched in this frame.
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

  void step_back(Track& track, Past& past) const {
    past.covered_at = frame_;
    KalmanState& state = track.state;
    const Lanes velocity = state.velocity;
    if (const StillState* before = state_before(past, kind_.position_back)) state = {*before, {}};
    const StillState* before = state_before(past, kind_.velocity_back);
    const double d = kind_.dampen;
    state.velocity = (before ? before->velocity : velocity) * Lanes{{d, d, d, d}};
    state.position[3] *= kind_.enlarge;
    set_box(track);
  }

  // Compute overlaps in float64 once a detection of this frame starts a track, because NumPy then widens its arrays.
  void suppress() override {
    fresh_.clear(), near_.clear();
    for (int j = 0; j < high_.size(); j++)
      if (!used_[j] && high_.rows[j].score >= options_.new_track)
        fresh_.push_back(j), near_.add(high_.rows[j].upright());
    const int count = near_.size();
    if (kind_.suppress >= 1 || !count) return;
    for (const std::vector<int>* list : {&tracked_, &found_})
      for (int s : *list)
        if (tracks_[s].status == TrackStatus::kTracked) near_.add(tracks_[s].box);
    int first = 0;  // of the detections that start tracks
    keep_apart([&](int i, int other) {
      while (first < i && used_[fresh_[first]]) first++;
      if (first == i) return near_.overlap(other, near_, i) >= static_cast<float>(kind_.suppress);
      const WideBox box = other < count ? corners(measure(high_.rows[fresh_[other]])) : widen(near_.boxes[other]);
      return track_iou(box, box.area(), widen(near_.boxes[i]), double(near_.areas[i])) >= kind_.suppress;
    });
  }

  // The columns are covered_at, the number of states, and the states from the oldest.
  static constexpr int kCounts = 2;
  int64_t past_columns() const override { return kCounts + kFilterColumns * static_cast<int64_t>(kept_); }

  void save_past(int slot, double* out) const override {
    const Past& past = pasts_[slot];
    const size_t held = past.states.size();
    *out++ = past.covered_at, *out++ = held;
    for (size_t back = held; back; back--) out = save(KalmanState{past.states[(past.matches - back) % kept_], {}}, out);
  }

  void load_past(int slot, const double* in) override {
    Past& past = new_past(slot);
    past.covered_at = in[0];
    bool mixed = false;
    for (int64_t k = 0; k < in[1]; k++) remember(past, load_state(in + kCounts + k * kFilterColumns, mixed));
  }
};

}  // namespace torch_fastdet::core
