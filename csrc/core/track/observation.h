// In OC-SORT (2023), tracks follow the direction of their observations, a second matching uses their last observations,
// and a track that is found again runs its filter through the gap on a line of virtual observations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/track/tracker.h"

namespace torch_fastdet::core {

struct ObservationOptions {
  int64_t span;   // frames between the observations that give a direction
  float inertia;  // weight of the angle between directions
  bool low;       // low scores continue tracks
};

class ObservationTracker : public Tracker {
 public:
  explicit ObservationTracker(const ObservationOptions& options) : Tracker(false), kind_(options) {}

 protected:
  struct Observation {
    int64_t frame;
    TrackBox box;
  };
  struct Point {
    float x, y;
  };
  struct Past {
    std::vector<Observation> seen;  // the newest span + 2, oldest first
    Point direction{};              // a unit vector; NaN: not known yet
    TrackBox last;                  // the last observation, moved with the camera
    KalmanState corrected;          // the filter after the last observation
  };
  ObservationOptions kind_;
  std::vector<Past> pasts_;  // indexed by slot
  std::vector<int> left_;

  static Point centre(const TrackBox& b) { return {(b.x1 + b.x2) / 2, (b.y1 + b.y2) / 2}; }
  static float length(const Point& p) { return std::sqrt(p.x * p.x + p.y * p.y); }

  Past& new_past(int slot) {
    if (pasts_.size() < tracks_.size()) pasts_.resize(tracks_.size());
    Past& past = pasts_[slot];
    past.seen.clear();
    past.seen.reserve(std::min<int64_t>(kind_.span + 3, kReserved));
    past.direction.x = std::numeric_limits<float>::quiet_NaN();
    return past;
  }

  void started(int slot) override {
    see(new_past(slot), tracks_[slot].box);
    pasts_[slot].corrected = tracks_[slot].state;
  }

  void see(Past& past, const TrackBox& box) {
    past.seen.push_back({frame_, past.last = box});
    if (static_cast<int64_t>(past.seen.size()) > kind_.span + 2) past.seen.erase(past.seen.begin());
  }

  void advance(const CameraMotion* motion) override {
    Tracker::advance(motion);
    if (!motion) return;
    const auto& r = motion->rotation;
    for (const std::vector<int>* list : {&pool_, &loose_})
      for (int s : *list) {
        TrackBox& box = pasts_[s].last;
        if (box.x1 < 0) continue;
        const Point at = centre(box);
        const double x = r[0][0] * at.x + r[0][1] * at.y + motion->translation[0];
        const double y = r[1][0] * at.x + r[1][1] * at.y + motion->translation[1];
        const float w = (box.x2 - box.x1) / 2, h = (box.y2 - box.y1) / 2;
        box = narrow({x - w, y - h, x + w, y + h});
      }
  }

  void take(int slot, const Stage& stage, int detection) override {
    Past& past = pasts_[slot];
    see(past, stage.rows[detection].upright());
    Tracker::take(slot, stage, detection);
    static_cast<StillState&>(past.corrected) = tracks_[slot].state;
    if (mixed_) past.corrected.cross = tracks_[slot].state.cross;
    auto before = past.seen.rbegin();
    while (before + 1 != past.seen.rend() && before->frame > frame_ - kind_.span) ++before;
    const Point now = centre(past.seen.back().box), then = centre(before->box), way{now.x - then.x, now.y - then.y};
    const float norm = length(way);
    past.direction = norm < 1e-6f ? Point{} : Point{way.x / norm, way.y / norm};
  }

  // Return the angle, in half turns, between a track's direction and the way from its last observation to a detection.
  float turn(const Past& past, const TrackBox& detection) const {
    if (std::isnan(past.direction.x) || past.last.x1 < 0) return 0;
    const Point from = centre(past.last), to = centre(detection), way{to.x - from.x, to.y - from.y};
    const float norm = length(way);
    if (!(norm > 1e-6f)) return 0;
    const float cosine = way.x / norm * past.direction.x + way.y / norm * past.direction.y;
    return std::acos(std::min(std::max(cosine, -1.f), 1.f)) / 3.14159265f;
  }

  void first_match() override {
    const Costs costs{options_.fuse_score};
    match(pool_, high_, options_.match_limit, false, [&](int i, int j, float overlap, const Detection& d) {
      float cost = costs(i, j, overlap, d);
      const Past& past = pasts_[pool_[i]];
      if (cost <= options_.match_limit) cost += kind_.inertia * turn(past, d.upright());
      __builtin_prefetch(past.seen.data(), 1), prefetch(&past.corrected);  // take() needs them soon
      return with_looks(cost, pool_[i], overlap, d);
    });
  }

  // Match tracked tracks before lost ones, which must not take their detections.
  void recover() override {
    left_.clear();
    for (int s : pool_)
      if (tracks_[s].status != TrackStatus::kTracked) left_.push_back(s);
    recover(rest_);
    recover(left_);
  }

  void recover(std::vector<int>& rows) {
    if (rotated_) {
      place(rows, tracked_shapes_, options_.match_limit);
    } else {
      tracked_shapes_.clear();
      for (int s : rows) {
        const TrackBox& last = pasts_[s].last;
        tracked_shapes_.add(last.x1 < 0 ? tracks_[s].box : last);  // beyond the left edge, use the filter's box
      }
    }
    match_placed(high_, options_.match_limit, true, looking_costs(rows));
    size_t kept = 0;
    for (size_t r = 0; r < rows.size(); r++) {
      const int s = rows[r], j = assignment_.column_of(static_cast<int>(r));
      if (j < 0) {
        rows[kept++] = s;
        continue;
      }
      if (tracks_[s].status != TrackStatus::kTracked) {
        fill_gap(tracks_[s], pasts_[s], high_.rows[j].upright());
        found_.push_back(s);
      }
      take(s, high_, j);
      used_[j] = 1;
    }
    rows.resize(kept);
  }

  // Run the filter again from a lost track's last observation, as if it had been seen on a line to this frame's box.
  void fill_gap(Track& track, const Past& past, const TrackBox& now) const {
    const Observation& last = past.seen.back();
    track.state = past.corrected;
    for (int64_t frame = last.frame + 1; frame <= frame_; frame++) {
      filter_.predict(track.state, mixed_, true);
      if (frame == frame_) break;
      const TrackBox seen = on_line(last, now, frame);
      filter_.correct(track.state, measure(seen.x1, seen.y1, seen.x2 - seen.x1, seen.y2 - seen.y1), mixed_);
    }
  }

  TrackBox on_line(const Observation& from, const TrackBox& to, int64_t frame) const {
    const double part = static_cast<double>(frame - from.frame) / static_cast<double>(frame_ - from.frame);
    const float a = static_cast<float>(1 - part), b = static_cast<float>(part);
    return {a * from.box.x1 + b * to.x1, a * from.box.y1 + b * to.y1, a * from.box.x2 + b * to.x2,
            a * from.box.y2 + b * to.y2};
  }

  void associate_low() override {
    if (kind_.low) return Tracker::associate_low();
    for (int s : rest_) lose(s);
  }

  // The columns are the direction, the corrected state, the last observation, and rows of frame x1 y1 x2 y2 (or NaN).
  int64_t past_columns() const override { return 2 + kFilterColumns + 4 + 5 * (kind_.span + 2); }

  void save_past(int slot, double* out) const override {
    const Past& past = pasts_[slot];
    *out++ = past.direction.x, *out++ = past.direction.y;
    out = save(past.corrected, out);
    for (float value : {past.last.x1, past.last.y1, past.last.x2, past.last.y2}) *out++ = value;
    std::fill(out, out + 5 * (kind_.span + 2), std::numeric_limits<double>::quiet_NaN());
    for (const Observation& o : past.seen)
      for (double value :
           {static_cast<double>(o.frame), double(o.box.x1), double(o.box.y1), double(o.box.x2), double(o.box.y2)})
        *out++ = value;
  }

  void load_past(int slot, const double* in) override {
    Past& past = new_past(slot);
    past.direction = {static_cast<float>(in[0]), static_cast<float>(in[1])};
    past.corrected = load_state(in + 2, mixed_);
    in += 2 + kFilterColumns;
    past.last = narrow({in[0], in[1], in[2], in[3]});
    in += 4;
    for (int64_t k = 0; k < kind_.span + 2 && !std::isnan(*in); k++, in += 5)
      past.seen.push_back({static_cast<int64_t>(in[0]),
                           {static_cast<float>(in[1]), static_cast<float>(in[2]), static_cast<float>(in[3]),
                            static_cast<float>(in[4])}});
    if (past.seen.empty()) past.seen.push_back({tracks_[slot].frame, past.last = tracks_[slot].box});
  }
};

}  // namespace torch_fastdet::core
