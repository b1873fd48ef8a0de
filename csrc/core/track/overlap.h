// Compute overlaps of boxes, and find which of many boxes can meet a box at all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/nms/rotated_math.h"

namespace torch_fastdet::core {

template <class T>
struct Corners {
  T x1, y1, x2, y2;
  T area() const { return (x2 - x1) * (y2 - y1); }
};
using TrackBox = Corners<float>;
using WideBox = Corners<double>;

inline TrackBox narrow(const WideBox& b) {
  return {static_cast<float>(b.x1), static_cast<float>(b.y1), static_cast<float>(b.x2), static_cast<float>(b.y2)};
}
inline WideBox widen(const TrackBox& b) {
  return {b.x1, b.y1, b.x2, b.y2};
}

template <class T>
T track_intersection(const Corners<T>& a, const Corners<T>& b) {
  const T w = std::max(std::min(a.x2, b.x2) - std::max(a.x1, b.x1), T(0));
  const T h = std::max(std::min(a.y2, b.y2) - std::max(a.y1, b.y1), T(0));
  return w * h;
}

// Compute the intersection over union in the trackers' NumPy order of operations. A box with NaN gives 0 or NaN.
template <class T>
T track_iou(const Corners<T>& a, T area_a, const Corners<T>& b, T area_b) {
  const T inside = track_intersection(a, b);
  return inside / (((area_b + area_a) - inside) + T(1e-7));
}

// Hold boxes with areas, or rotated boxes with the squares that they reach; disjoint squares mean no overlap.
struct TrackShapes {
  std::vector<TrackBox> boxes;
  std::vector<float> areas;
  std::vector<RotatedBox<float>> rotated;

  int size() const { return static_cast<int>(boxes.size()); }
  void clear() { boxes.clear(), areas.clear(), rotated.clear(); }
  void add(const TrackBox& box) {
    boxes.push_back(box);
    areas.push_back(box.area());
  }
  void add(const RotatedCandidate<float>& box, float reach_scale) {
    const RotatedBox<float> placed = place_rotated(box, 0.f, reach_scale);
    const float reach = 1.0001f * std::sqrt(placed.reach);
    boxes.push_back({placed.x - reach, placed.y - reach, placed.x + reach, placed.y + reach});
    rotated.push_back(placed);
  }
  float overlap(int i, const TrackShapes& other, int j) const {
    if (rotated.empty()) return track_iou(boxes[i], areas[i], other.boxes[j], other.areas[j]);
    return rotated_boxes_near(rotated[i], other.rotated[j]) ? probiou(rotated[i], other.rotated[j]) : 0.f;
  }
};

// Each axis is cut into slices. A slice has bits for the boxes that begin in it or before, and for those that end in it
// or later; ANDs of them give the boxes that may meet a query. Boxes are sorted by upper edge, so few words are read.
class BoxIndex {
 public:
  void build(const TrackBox* boxes, int count) {
    words_ = (count + 63) / 64;
    slices_ = count <= 32 ? 16 : count <= 128 ? 64 : kMaxSlices;
    bits_.assign(static_cast<size_t>(3) * slices_ * words_, 0);
    if (!count) return;
    float left = 3e38f, top = 3e38f, right = -3e38f, bottom = -3e38f;
    for (int j = 0; j < count; j++) {
      left = std::min(left, boxes[j].x1), right = std::max(right, boxes[j].x2);
      top = std::min(top, boxes[j].y1), bottom = std::max(bottom, boxes[j].y2);
    }
    x_ = {left, slices_ / std::max(right - left, 1e-6f), slices_ - 1.f};
    y_ = {top, slices_ / std::max(bottom - top, 1e-6f), slices_ - 1.f};
    std::fill(upper_, upper_ + slices_ + 1, 0);
    order_.resize(count);
    slice_of_.resize(count);
    for (int j = 0; j < count; j++) upper_[(slice_of_[j] = static_cast<uint8_t>(y_.slice(boxes[j].y1))) + 1]++;
    for (int k = 0; k < slices_; k++) upper_[k + 1] += upper_[k];
    uint64_t *begin_x = set(0), *end_x = set(1), *end_y = set(2);
    for (int j = 0; j < count; j++) {
      const int place = upper_[slice_of_[j]]++, word = place >> 6;
      const uint64_t bit = uint64_t{1} << (place & 63);
      order_[place] = j;
      begin_x[x_.slice(boxes[j].x1) * words_ + word] |= bit;
      end_x[x_.slice(boxes[j].x2) * words_ + word] |= bit;
      end_y[y_.slice(boxes[j].y2) * words_ + word] |= bit;
    }
    const int all = slices_ * words_;
    for (int k = words_; k < all; k++) begin_x[k] |= begin_x[k - words_];
    for (int k = all - words_ - 1; k >= 0; k--) end_x[k] |= end_x[k + words_], end_y[k] |= end_y[k + words_];
    for (int k = 0; k < slices_; k++) {
      first_[k] = 0;
      while (first_[k] < words_ && !end_y[k * words_ + first_[k]]) first_[k]++;
    }
  }

  // Find the pairs that may meet, ordered by query: query rows()[k] and box columns()[k]. Return their number.
  int collect(const TrackBox* queries, int count) {
    size_t hits = 0;
    for (int i = 0; i < count; i++) {
      if (hits_.size() < hits + words_ + 2) hits_.resize(2 * (hits + words_ + 2) + count);
      const int top = y_.slice(queries[i].y1), bottom = y_.slice(queries[i].y2);
      const uint64_t* begin_x = set(0) + x_.slice(queries[i].x2) * words_;
      const uint64_t* end_x = set(1) + x_.slice(queries[i].x1) * words_;
      const uint64_t* end_y = set(2) + top * words_;
      for (int w = first_[top]; w * 64 < upper_[bottom]; w++) {
        const int more = upper_[bottom] - w * 64;
        const uint64_t begin_y = more < 64 ? (uint64_t{1} << more) - 1 : ~uint64_t{0};
        const uint64_t bits = begin_x[w] & end_x[w] & begin_y & end_y[w];
        hits_[hits] = {bits, i, w * 64};
        hits += bits != 0;
      }
    }
    int k = 0;
    for (size_t h = 0; h < hits; h++) {
      if (rows_.size() < static_cast<size_t>(k) + 64) rows_.resize(2 * k + 64), columns_.resize(2 * k + 64);
      for (uint64_t bits = hits_[h].bits; bits; bits &= bits - 1) {
        rows_[k] = hits_[h].row;
        columns_[k++] = order_[hits_[h].base + __builtin_ctzll(bits)];
      }
    }
    return k;
  }
  const int* rows() const { return rows_.data(); }
  const int* columns() const { return columns_.data(); }

 private:
  static constexpr int kMaxSlices = 128;
  struct Axis {
    float origin, scale, last;
    int slice(float value) const {  // NaN: 0
      return static_cast<int>(std::min(std::max(0.f, (value - origin) * scale), last));
    }
  };
  struct Hit {
    uint64_t bits;
    int row, base;
  };
  int slices_ = 16, words_ = 0;
  Axis x_{0, 0, 0}, y_{0, 0, 0};
  std::vector<uint64_t> bits_;  // three sets (begin x, end x, end y) of slices_ * words_
  std::vector<int> order_, rows_, columns_;
  std::vector<uint8_t> slice_of_;
  std::vector<Hit> hits_;
  int first_[kMaxSlices];      // the first words of end y that are not zero
  int upper_[kMaxSlices + 1];  // numbers of boxes that begin in a slice of y or before
  uint64_t* set(int k) { return bits_.data() + static_cast<size_t>(k) * slices_ * words_; }
};

}  // namespace torch_fastdet::core
