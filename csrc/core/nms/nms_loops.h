// Run suppression on the CPU with candidates.h and nms_math.h. parallel_for(begin, end, grain, f) runs over the images
// or within each of them.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/common/cpu_types.h"
#include "core/common/exact_math_avx2.h"
#include "core/nms/candidates.h"
#include "core/nms/rotated_math.h"
#include "core/nms/scale_boxes_math.h"

namespace torch_fastdet::core::nms_loops {
namespace {  // local to each including file, so that functions called once are inlined

constexpr int64_t kAnchorsPerTask = 2048;
constexpr int64_t kFirstChunk = 256, kLargestChunk = 4096;

template <typename A>
struct Candidate {
  A confidence;
  uint32_t index;
  bool operator<(const Candidate& other) const {
    return confidence != other.confidence ? confidence > other.confidence : index < other.index;
  }
};

template <typename A>
using Candidates = std::vector<Candidate<A>>;

template <typename A>
void keep_best(Candidates<A>& candidates, int64_t count) {
  if (static_cast<int64_t>(candidates.size()) <= count) return;
  std::nth_element(candidates.begin(), candidates.begin() + count, candidates.end());
  candidates.resize(count);
}

constexpr int64_t kBlock = 32;  // boxes that any_overlaps() tests without branching

// Hold upright boxes of one arithmetic type as arrays, for vector instructions.
template <typename A>
struct Boxes {
  using Box = CornerBox<A>;
  std::vector<A> x1, y1, x2, y2, area;
  std::vector<int32_t> class_index;

  int64_t size() const { return static_cast<int64_t>(x1.size()); }
  void push(const Box& box, int32_t box_class) {
    x1.push_back(box.x1);
    y1.push_back(box.y1);
    x2.push_back(box.x2);
    y2.push_back(box.y2);
    area.push_back(core::area(box));
    class_index.push_back(box_class);
  }

  // Return whether any of boxes [begin, end) suppresses `box`. This is overlaps() without its branches.
  template <bool same_class>
  bool any_overlaps(int64_t begin, int64_t end, const Box& box, int32_t box_class, A threshold) const {
    const A box_area = core::area(box);
    for (int64_t start = begin; start < end; start += kBlock) {
      const int64_t stop = std::min(start + kBlock, end);
      int32_t hit = 0;
      for (int64_t i = start; i < stop; ++i) {
        const A left = x1[i] > box.x1 ? x1[i] : box.x1, right = x2[i] < box.x2 ? x2[i] : box.x2;
        const A top = y1[i] > box.y1 ? y1[i] : box.y1, bottom = y2[i] < box.y2 ? y2[i] : box.y2;
        const A width = right - left, height = bottom - top;
        const A intersection = width * height;
        const A ratio = intersection / (area[i] + box_area - intersection);
        int32_t meets = (width > 0) & (height > 0) & (ratio > threshold);
        if constexpr (same_class) meets &= class_index[i] == box_class;
        hit |= meets;
      }
      if (hit) return true;
    }
    return false;
  }
};

// Do the same for rotated boxes: test a block of them cheaply, and evaluate the formula if any is near.
template <typename A>
struct RotatedBoxes {
  using Box = RotatedBox<A>;
  std::vector<A> x, y, reach;
  std::vector<Box> boxes;
  std::vector<int32_t> class_index;

  int64_t size() const { return static_cast<int64_t>(x.size()); }
  void push(const Box& box, int32_t box_class) {
    x.push_back(box.x);
    y.push_back(box.y);
    reach.push_back(box.reach);
    boxes.push_back(box);
    class_index.push_back(box_class);
  }

  template <bool same_class>
  bool any_overlaps(int64_t begin, int64_t end, const Box& box, int32_t box_class, A threshold) const {
    for (int64_t start = begin; start < end; start += kBlock) {
      const int64_t stop = std::min(start + kBlock, end);
      int32_t near = 0;
      for (int64_t i = start; i < stop; ++i) {
        const A across = x[i] - box.x, down = y[i] - box.y;
        near |= across * across + down * down <= reach[i] + box.reach;
      }
      if (!near) continue;
      for (int64_t i = start; i < stop; ++i) {
        if (same_class && class_index[i] != box_class) continue;
        if (rotated_boxes_overlap(boxes[i], box, threshold)) return true;
      }
    }
    return false;
  }
};

constexpr int64_t kNeighbours = 512;  // anchors whose class scores are read together

// Raise each of `highest` to the score of one class at the same anchor. Anchors are adjacent, and NaN is ignored.
template <typename T>
TORCH_FASTDET_HOST_DEVICE void raise_to(const T* scores, int64_t begin, int64_t end,
                                        arithmetic_t<T>* __restrict highest) {
  for (int64_t i = begin; i < end; ++i) {
    const auto score = Storage<T>::load(scores[i]);
    highest[i] = score > highest[i] ? score : highest[i];
  }
}

#ifdef TORCH_FASTDET_AVX2
template <class Halves, typename T>
TORCH_FASTDET_AVX2 __attribute__((flatten)) void raise_to_avx2(const T* scores, int64_t count,
                                                               arithmetic_t<T>* highest) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, typename Halves::Float16>) {  // compilers use no instruction to convert it
    for (; i + 8 <= count; i += 8) {
      const __m256 score = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scores + i)));
      _mm256_storeu_ps(highest + i, _mm256_max_ps(score, _mm256_loadu_ps(highest + i)));
    }
  }
  raise_to(scores, i, count, highest);
}
#endif

template <class Halves, typename T>
void highest_scores(const Scores<T>& scores, int64_t classes, int64_t count, arithmetic_t<T>* highest) {
  std::fill(highest, highest + count, -std::numeric_limits<arithmetic_t<T>>::infinity());
  for (int64_t c = 0; c < classes; ++c) {
    const T* row = scores.first + c * scores.stride;
#ifdef TORCH_FASTDET_AVX2
    if (has_avx2()) {
      raise_to_avx2<Halves>(row, count, highest);
      continue;
    }
#endif
    raise_to(row, 0, count, highest);
  }
}

template <class Halves, typename Layout, typename ParallelFor>
class ImageSuppression {
 public:
  using A = typename Layout::A;

  ImageSuppression(const CandidateSource& source, const NmsOptions& options, const ClassFilter& filter, int64_t image,
                   const ParallelFor& parallel_for)
      : source_(source), options_(options), filter_(filter), image_(image), parallel_for_(parallel_for) {
    for (int64_t i = 0; i < source_.label_count; ++i) {
      promoted_ = promoted_ || source_.labels[i * 6] == static_cast<float>(image);
    }
  }

  void run(const NmsOutput& output) {
    Candidates<A> candidates = select();
    const int64_t count = suppress(candidates);
    write(output, count);
  }

 private:
  Candidates<A> select() const {
    const int64_t anchors = source_.classes ? source_.anchors + source_.label_count : 0;
    const int64_t tasks = (anchors + kAnchorsPerTask - 1) / kAnchorsPerTask;
    std::vector<Candidates<A>> found(tasks);
    parallel_for_(0, tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t last = std::min(anchors, (task + 1) * kAnchorsPerTask);
        select_anchors(task * kAnchorsPerTask, last, found[task]);
        keep_best(found[task], options_.max_candidates);
      }
    });
    size_t total = 0;
    for (const auto& part : found) total += part.size();
    Candidates<A> all;
    all.reserve(total);
    for (const auto& part : found) all.insert(all.end(), part.begin(), part.end());
    keep_best(all, options_.max_candidates);
    return all;
  }

  void add(int64_t n, int64_t c, A confidence, Candidates<A>& found) const {
    if (!is_finite(confidence) || !is_allowed(filter_, c)) return;
    found.push_back({confidence, static_cast<uint32_t>(n * source_.classes + c)});
  }

  // If classes are far apart in memory, read neighbouring anchors together, then only those that can pass one by one.
  void select_anchors(int64_t n, int64_t end, Candidates<A>& found) const {
    const A floor = score_floor<Layout>(options_, promoted_);
    A highest[kNeighbours];
    while (n < end) {
      const int64_t count = std::min({kNeighbours, end - n, Layout::neighbours(source_, n)});
      if (count <= 0) {
        select_anchor(n++, found);
        continue;
      }
      const auto scores = Layout::scores(source_, Layout::anchor(source_, image_, n));
      highest_scores<Halves>(scores, source_.classes, count, highest);
      for (int64_t i = 0; i < count; ++i) {
        if (highest[i] > floor) select_anchor(n + i, found);
      }
      n += count;
    }
  }

  void select_anchor(int64_t n, Candidates<A>& found) const {
    const A threshold = confidence_threshold<A>(options_, promoted_);
    if (n >= source_.anchors) {
      const int64_t label = n - source_.anchors;
      if (A(1) > threshold && label_exists(source_, label, image_)) {
        add(n, static_cast<int64_t>(source_.labels[label * 6 + 1]), A(1), found);
      }
      return;
    }
    const auto anchor = Layout::anchor(source_, image_, n);
    A objectness = 0;
    if (!Layout::objectness(source_, anchor, options_, objectness)) return;
    const auto scores = Layout::scores(source_, anchor);
    const size_t before = found.size();
    A best = -1;
    int64_t best_class = 0;
    for (int64_t c = 0; c < source_.classes; ++c) {
      A score = 0;
      if (!Layout::score(scores.at(c), options_, score)) continue;
      const A confidence = core::confidence<Layout>(source_, objectness, score, promoted_);
      if (confidence > best) {
        best = confidence;
        best_class = c;
      } else if (confidence != confidence && (!options_.multi_label || options_.nan_class_drops_anchor)) {
        found.resize(before);
        return;
      }
      if (options_.multi_label && confidence > threshold) add(n, c, confidence, found);
    }
    if (!options_.multi_label && best > threshold) add(n, best_class, best, found);
  }

  struct Row {
    A box[4];  // corners, or center and size of a rotated box
    A confidence;
    int64_t anchor;
    int32_t class_index;
  };

  int64_t suppress(Candidates<A>& candidates) {
    const bool same_class = options_.class_rule == ClassRule::kExact;
    if constexpr (Layout::kMayBeRotated) {
      if (options_.rotated != RotatedRule::kNone) {
        return same_class ? suppress<RotatedBoxes<A>, true>(candidates) : suppress<RotatedBoxes<A>, false>(candidates);
      }
    }
    return same_class ? suppress<Boxes<A>, true>(candidates) : suppress<Boxes<A>, false>(candidates);
  }

  // Decode a candidate into its row and the box used for comparison. Return false if it is not finite.
  bool place(const Candidate<A>& candidate, A offset, Row& row, CornerBox<A>& placed) const {
    const int64_t n = candidate.index / source_.classes;
    const int32_t c = static_cast<int32_t>(candidate.index % source_.classes);
    const CornerBox<A> box = candidate_corners<Layout>(source_, image_, n, promoted_);
    row = {{box.x1, box.y1, box.x2, box.y2}, candidate.confidence, n, c};
    placed = moved(box, mul_rn(A(c), offset));
    return is_finite(box);
  }
  bool place(const Candidate<A>& candidate, A offset, Row& row, RotatedBox<A>& placed) const {
    const int64_t n = candidate.index / source_.classes;
    const int32_t c = static_cast<int32_t>(candidate.index % source_.classes);
    const auto rotated = Layout::rotated(source_, Layout::anchor(source_, image_, n), c);
    const CenterBox<A>& box = rotated.box;
    row = {{box.x, box.y, box.width, box.height}, candidate.confidence, n, c};
    const bool finite = is_finite(rotated);
    placed = finite ? place_rotated(rotated, mul_rn(A(c), offset), A(options_.reach_scale)) : no_rotated_box<A>();
    return finite;
  }

  // Sort, decode and decide in chunks, so that an image that reaches max_detections early stops early.
  template <typename List, bool same_class>
  int64_t suppress(Candidates<A>& candidates) {
    const int64_t total = static_cast<int64_t>(candidates.size());
    const A threshold = A(options_.iou);
    const A offset = options_.class_rule == ClassRule::kOffset ? A(options_.max_wh) : A(0);
    const bool fast = options_.rotated == RotatedRule::kFast;
    List against;  // the kept boxes or, if `fast`, all candidates so far
    std::vector<Row> rows;
    std::vector<typename List::Box> placed;
    std::vector<uint8_t> alive;
    int64_t chunk = kFirstChunk;
    for (int64_t begin = 0; begin < total; begin += chunk, chunk = std::min(chunk * 2, kLargestChunk)) {
      if (static_cast<int64_t>(kept_.size()) >= options_.max_detections) break;
      const int64_t count = std::min(chunk, total - begin);
      const auto first = candidates.begin() + begin;
      if (begin + count < total) std::nth_element(first, first + count, candidates.end());
      std::sort(first, first + count);
      rows.resize(count);
      placed.resize(count);
      alive.assign(count, 0);
      const int64_t known = against.size(), grain = 64 + (1 << 14) / (known + 1);
      const auto is_open = [&](int64_t from, int64_t end, int64_t i) {
        return !against.template any_overlaps<same_class>(from, end, placed[i], rows[i].class_index, threshold);
      };
      parallel_for_(0, count, grain, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; ++i) {
          alive[i] = place(candidates[begin + i], offset, rows[i], placed[i]) && is_open(0, known, i);
        }
      });
      if (fast) {
        for (int64_t i = 0; i < count; ++i) against.push(placed[i], rows[i].class_index);
        parallel_for_(0, count, grain, [&](int64_t from, int64_t to) {
          for (int64_t i = from; i < to; ++i) alive[i] = alive[i] && is_open(known, known + i, i);
        });
      }
      for (int64_t i = 0; i < count; ++i) {
        if (!alive[i] || (!fast && !is_open(known, against.size(), i))) continue;
        if (!fast) against.push(placed[i], rows[i].class_index);
        kept_.push_back(rows[i]);
        if (static_cast<int64_t>(kept_.size()) >= options_.max_detections) break;
      }
    }
    return static_cast<int64_t>(kept_.size());
  }

  CornerBox<A> in_original_pixels(const Row& row, const A* letterbox) const {
    const Letterbox<A> l = letterbox_of(letterbox);
    if (options_.rotated == RotatedRule::kNone) {
      return scale_corners(CornerBox<A>{row.box[0], row.box[1], row.box[2], row.box[3]}, l);
    }
    const auto box = scale_center(CenterBox<A>{row.box[0], row.box[1], row.box[2], row.box[3]}, l);
    return {box.x, box.y, box.width, box.height};
  }

  void write(const NmsOutput& output, int64_t count) const {
    const int64_t capacity = options_.max_detections, width = 6 + source_.extra;
    A* rows = static_cast<A*>(output.detections) + image_ * capacity * width;
    output.counts[image_] = count;
    const A* letterbox = letterbox_row<A>(output, image_);
    for (int64_t i = 0; i < count; ++i, rows += width) {
      const Row& row = kept_[i];
      CornerBox<A> box{row.box[0], row.box[1], row.box[2], row.box[3]};
      if (letterbox) box = in_original_pixels(row, letterbox);
      rows[0] = box.x1;
      rows[1] = box.y1;
      rows[2] = box.x2;
      rows[3] = box.y2;
      rows[4] = row.confidence;
      rows[5] = A(row.class_index);
      for (int64_t e = 0; e < source_.extra; ++e) {
        rows[6 + e] = detection_extra<Layout>(source_, options_, image_, row.anchor, e, promoted_, letterbox);
      }
    }
    std::fill(rows, rows + (capacity - count) * width, A(0));
    int64_t* indices = output.indices + image_ * capacity;
    for (int64_t i = 0; i < capacity; ++i) indices[i] = i < count ? kept_[i].anchor : -1;
  }

  const CandidateSource& source_;
  const NmsOptions& options_;
  const ClassFilter& filter_;
  const int64_t image_;
  const ParallelFor& parallel_for_;
  bool promoted_ = false;
  std::vector<Row> kept_;
};

template <class Halves, typename F>
void dispatch_source(const CandidateSource& source, F&& f) {
  switch (source.layout) {
    case CandidateLayout::kPrediction:
      return with_dtype<Halves>(source.dtype, [&](auto zero) { f(PredictionLayout<decltype(zero)>{}); });
    case CandidateLayout::kAnchorHeads:
      return with_dtype<Halves>(source.dtype, [&](auto zero) { f(AnchorHeadLayout<decltype(zero)>{}); });
    case CandidateLayout::kAnchorFreeHeads:
      return with_dtype<Halves>(source.dtype, [&](auto zero) { f(AnchorFreeHeadLayout<decltype(zero)>{}); });
  }
}

// `threads` is how many threads share the work. If there are fewer images, each image is processed in parallel.
template <class Halves, typename ParallelFor>
void suppress(const CandidateSource& source, const NmsOptions& options, const ClassFilter& filter,
              const NmsOutput& output, int64_t threads, const ParallelFor& parallel_for) {
  dispatch_source<Halves>(source, [&](auto layout) {
    const auto run = [&](int64_t begin, int64_t end) {
      for (int64_t image = begin; image < end; ++image) {
        ImageSuppression<Halves, decltype(layout), ParallelFor>(source, options, filter, image, parallel_for)
            .run(output);
      }
    };
    source.images >= threads ? parallel_for(0, source.images, 1, run) : run(0, source.images);
  });
}

}  // namespace
}  // namespace torch_fastdet::core::nms_loops
