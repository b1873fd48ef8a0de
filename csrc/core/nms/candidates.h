// Read candidates from a CandidateSource: objectness, class confidence, box and extra columns of one anchor, rounded to
// the stored type T. Each layout has a class, which both the CPU loop and the kernels use.
#pragma once

#include "core/common/storage.h"
#include "core/nms/nms.h"

namespace torch_fastdet::core {

TORCH_FASTDET_HOST_DEVICE bool is_allowed(const ClassFilter& filter, int64_t class_index) {
  return !filter.active || filter.has(class_index);
}

TORCH_FASTDET_HOST_DEVICE bool label_exists(const CandidateSource& source, int64_t label, int64_t image) {
  const float* row = source.labels + label * 6;
  return row[0] == static_cast<float>(image) && row[1] >= 0 && row[1] < static_cast<float>(source.classes);
}

struct Cell {
  int32_t level, anchor;
  int64_t row, column;
};

TORCH_FASTDET_HOST_DEVICE Cell locate(const CandidateSource& source, int64_t anchor) {
  int32_t level = 0;
  while (level + 1 < source.levels && anchor >= source.level[level + 1].first_anchor) ++level;
  const HeadLevel& head = source.level[level];
  const uint32_t local = static_cast<uint32_t>(anchor - head.first_anchor);
  const uint32_t columns = head.columns, rows = head.rows;
  const uint32_t line = local / columns;
  return {level, static_cast<int32_t>(line / rows), line % rows, local - line * columns};
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE const T* at_cell(const HeadMap& map, int64_t image, const Cell& cell) {
  return static_cast<const T*>(map.data) + image * map.image + cell.anchor * map.anchor + cell.row * map.row +
         cell.column * map.column;
}

template <typename T>
struct Scores {
  const T* first;
  int64_t stride;

  TORCH_FASTDET_HOST_DEVICE arithmetic_t<T> at(int64_t c) const { return Storage<T>::load(first[c * stride]); }
};

// Each layout provides:
//   Anchor anchor(image, n)            where anchor n lies
//   bool objectness(anchor, options, A& value)    false if it cannot pass
//   Scores<T> scores(anchor)           where its class scores lie
//   int64_t neighbours(n)              anchors from n on whose class scores are adjacent, if only these decide whether
//                                      an anchor can pass; otherwise 0 or less
//   bool score(raw, options, A& value)            class score before objectness; false if it cannot pass
//   CenterBox<A> box(anchor)           pixels, rounded to T
//   A extra(anchor, e)
//   RotatedCandidate<A> rotated(anchor, class)    pixels and radians, rounded to T, if boxes may be rotated
template <typename A>
struct RotatedCandidate {
  CenterBox<A> box;
  A angle;
};

template <typename T>
struct PredictionLayout {
  using Stored = T;
  using A = arithmetic_t<T>;
  using Anchor = const T*;
  static constexpr bool kLogits = false, kMayHaveObjectness = true, kMayBeRotated = true, kHasKeypoints = false;

  static TORCH_FASTDET_HOST_DEVICE Anchor anchor(const CandidateSource& source, int64_t image, int64_t n) {
    return static_cast<const T*>(source.data) + image * source.image_stride + n * source.anchor_stride;
  }
  static TORCH_FASTDET_HOST_DEVICE bool objectness(const CandidateSource& source, Anchor anchor,
                                                   const NmsOptions& options, A& value) {
    if (!source.has_objectness) {
      value = 1;
      return true;
    }
    value = Storage<T>::load(anchor[4 * source.channel_stride]);
    return value > A(options.confidence);
  }
  static TORCH_FASTDET_HOST_DEVICE Scores<T> scores(const CandidateSource& source, Anchor anchor) {
    return {anchor + (4 + source.has_objectness) * source.channel_stride, source.channel_stride};
  }
  static TORCH_FASTDET_HOST_DEVICE int64_t neighbours(const CandidateSource& source, int64_t n) {
    return source.anchor_stride == 1 && !source.has_objectness ? source.anchors - n : 0;
  }
  static TORCH_FASTDET_HOST_DEVICE bool score(A raw, const NmsOptions&, A& value) {
    value = raw;
    return true;
  }
  static TORCH_FASTDET_HOST_DEVICE CenterBox<A> box(const CandidateSource& source, Anchor anchor) {
    const int64_t step = source.channel_stride;
    return {Storage<T>::load(anchor[0]), Storage<T>::load(anchor[step]), Storage<T>::load(anchor[2 * step]),
            Storage<T>::load(anchor[3 * step])};
  }
  static TORCH_FASTDET_HOST_DEVICE A extra(const CandidateSource& source, Anchor anchor, int64_t e) {
    return Storage<T>::load(anchor[(4 + source.has_objectness + source.classes + e) * source.channel_stride]);
  }
  static TORCH_FASTDET_HOST_DEVICE RotatedCandidate<A> rotated(const CandidateSource& source, Anchor anchor,
                                                               int64_t box_class) {
    // Without extra columns the last column of a row is its class, which the original function reads as the angle.
    return {box(source, anchor), source.extra ? extra(source, anchor, source.extra - 1) : A(box_class)};
  }
};

template <typename T>
struct HeadAnchor {
  const T* boxes;
  const T* scores;
  const T* extra;
  Cell cell;
};

template <typename T>
struct HeadLayout {
  using Stored = T;
  using A = arithmetic_t<T>;
  using Anchor = HeadAnchor<T>;
  static constexpr bool kLogits = true;

  static TORCH_FASTDET_HOST_DEVICE bool score(A raw, const NmsOptions& options, A& value) {
    if (raw <= A(options.logit_floor)) return false;
    value = Storage<T>::round(sigmoid(raw));
    return true;
  }
};

template <typename T>
struct AnchorHeadLayout : HeadLayout<T> {
  using typename HeadLayout<T>::A;
  using typename HeadLayout<T>::Anchor;
  static constexpr bool kMayHaveObjectness = true, kMayBeRotated = false, kHasKeypoints = false;

  static TORCH_FASTDET_HOST_DEVICE Anchor anchor(const CandidateSource& source, int64_t image, int64_t n) {
    const Cell cell = locate(source, n);
    return {at_cell<T>(source.level[cell.level].boxes, image, cell), nullptr, nullptr, cell};
  }
  static TORCH_FASTDET_HOST_DEVICE A channel(const CandidateSource& source, const Anchor& anchor, int64_t c) {
    return Storage<T>::load(anchor.boxes[c * source.level[anchor.cell.level].boxes.channel]);
  }
  static TORCH_FASTDET_HOST_DEVICE bool objectness(const CandidateSource& source, const Anchor& anchor,
                                                   const NmsOptions& options, A& value) {
    const A logit = channel(source, anchor, 4);
    if (!(logit > A(options.logit_floor))) return false;
    value = Storage<T>::round(sigmoid(logit));
    return value > A(options.confidence);
  }
  static TORCH_FASTDET_HOST_DEVICE Scores<T> scores(const CandidateSource& source, const Anchor& anchor) {
    const int64_t step = source.level[anchor.cell.level].boxes.channel;
    return {anchor.boxes + 5 * step, step};
  }
  static TORCH_FASTDET_HOST_DEVICE int64_t neighbours(const CandidateSource&, int64_t) { return 0; }
  static TORCH_FASTDET_HOST_DEVICE CenterBox<A> box(const CandidateSource& source, const Anchor& anchor) {
    const Cell& cell = anchor.cell;
    const A stride = A(source.level[cell.level].stride);
    const int64_t side = (cell.level * source.anchors_per_cell + cell.anchor) * 2;
    const float* sides = source.anchor_sides_device ? source.anchor_sides_device : source.anchor_sides;
    return {Storage<T>::round(center_of(sigmoid(channel(source, anchor, 0)), cell.column, stride)),
            Storage<T>::round(center_of(sigmoid(channel(source, anchor, 1)), cell.row, stride)),
            Storage<T>::round(side_of(sigmoid(channel(source, anchor, 2)), mul_rn(A(sides[side]), stride))),
            Storage<T>::round(side_of(sigmoid(channel(source, anchor, 3)), mul_rn(A(sides[side + 1]), stride)))};
  }
  static TORCH_FASTDET_HOST_DEVICE A extra(const CandidateSource& source, const Anchor& anchor, int64_t e) {
    return channel(source, anchor, 5 + source.classes + e);
  }
};

template <typename T>
struct AnchorFreeHeadLayout : HeadLayout<T> {
  using typename HeadLayout<T>::A;
  using typename HeadLayout<T>::Anchor;
  static constexpr bool kMayHaveObjectness = false, kMayBeRotated = true, kHasKeypoints = true;

  static TORCH_FASTDET_HOST_DEVICE Anchor anchor(const CandidateSource& source, int64_t image, int64_t n) {
    const Cell cell = locate(source, n);
    const HeadLevel& head = source.level[cell.level];
    return {at_cell<T>(head.boxes, image, cell), at_cell<T>(head.scores, image, cell),
            head.extra.data ? at_cell<T>(head.extra, image, cell) : nullptr, cell};
  }
  static TORCH_FASTDET_HOST_DEVICE bool objectness(const CandidateSource&, const Anchor&, const NmsOptions&, A& value) {
    value = 1;
    return true;
  }
  static TORCH_FASTDET_HOST_DEVICE Scores<T> scores(const CandidateSource& source, const Anchor& anchor) {
    return {anchor.scores, source.level[anchor.cell.level].scores.channel};
  }
  static TORCH_FASTDET_HOST_DEVICE int64_t neighbours(const CandidateSource& source, int64_t n) {
    const HeadLevel& head = source.level[locate(source, n).level];
    const int64_t end = head.first_anchor + static_cast<int64_t>(head.rows) * head.columns;
    return head.scores.column == 1 && head.scores.row == head.columns ? end - n : 0;
  }
  static TORCH_FASTDET_HOST_DEVICE void distances(const CandidateSource& source, const Anchor& anchor,
                                                  A (&distance)[4]) {
    const HeadLevel& head = source.level[anchor.cell.level];
    for (int side = 0; side < 4; ++side) {
      const T* logits = anchor.boxes + side * source.bins * head.boxes.channel;
      const int64_t step = head.boxes.channel;
      distance[side] = expected_bin<A>(source.bins, [=](int i) { return Storage<T>::load(logits[i * step]); });
    }
  }
  static TORCH_FASTDET_HOST_DEVICE CenterBox<A> rounded(const CenterBox<A>& box) {
    return {Storage<T>::round(box.x), Storage<T>::round(box.y), Storage<T>::round(box.width),
            Storage<T>::round(box.height)};
  }
  static TORCH_FASTDET_HOST_DEVICE CenterBox<A> box(const CandidateSource& source, const Anchor& anchor) {
    A distance[4];
    distances(source, anchor, distance);
    const A stride = A(source.level[anchor.cell.level].stride);
    return rounded(decode_distances(distance, anchor.cell.column, anchor.cell.row, stride));
  }
  static TORCH_FASTDET_HOST_DEVICE A extra(const CandidateSource& source, const Anchor& anchor, int64_t e) {
    const HeadLevel& head = source.level[anchor.cell.level];
    const A raw = Storage<T>::load(anchor.extra[e * head.extra.channel]);
    if (source.extra_kind == ExtraKind::kRaw) return raw;
    if (source.extra_kind == ExtraKind::kAngleLogit) {
      if (e + 1 < source.extra) return raw;
      return Storage<T>::round(mul_rn(sub_rn(sigmoid(raw), A(0.25)), A(3.14159265358979323846)));
    }
    const int32_t value = static_cast<int32_t>(e % source.keypoint_values);
    if (value == 2) return Storage<T>::round(sigmoid(raw));
    const A cell = A(value ? anchor.cell.row : anchor.cell.column);
    const A from_corner = source.extra_kind == ExtraKind::kKeypoints ? add_rn(mul_rn(raw, A(2)), cell)
                                                                     : add_rn(raw, add_rn(cell, A(0.5)));
    return Storage<T>::round(mul_rn(from_corner, A(head.stride)));
  }
  static TORCH_FASTDET_HOST_DEVICE RotatedCandidate<A> rotated(const CandidateSource& source, const Anchor& anchor,
                                                               int64_t) {
    A distance[4];
    distances(source, anchor, distance);
    const A angle = extra(source, anchor, source.extra - 1), stride = A(source.level[anchor.cell.level].stride);
    return {rounded(decode_rotated(distance, angle, anchor.cell.column, anchor.cell.row, stride)), angle};
  }
};

// Multiply a class score by objectness, rounding to the stored type unless `promoted` (images with labels).
template <typename Layout>
TORCH_FASTDET_HOST_DEVICE typename Layout::A confidence(const CandidateSource& source, typename Layout::A objectness,
                                                        typename Layout::A score, bool promoted) {
  if (!source.has_objectness) return score;
  const typename Layout::A product = mul_rn(score, objectness);
  return promoted ? product : Storage<typename Layout::Stored>::round(product);
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE A confidence_threshold(const NmsOptions& options, bool promoted) {
  return A(promoted ? options.confidence_promoted : options.confidence);
}

// Return the stored score (a logit if the layout has logits) that a class score must exceed to pass.
template <typename Layout>
TORCH_FASTDET_HOST_DEVICE typename Layout::A score_floor(const NmsOptions& options, bool promoted) {
  using A = typename Layout::A;
  return Layout::kLogits ? A(options.logit_floor) : confidence_threshold<A>(options, promoted);
}

// Return the corners of candidate anchor n (a label if n >= source.anchors), in the input's pixels.
template <typename Layout>
TORCH_FASTDET_HOST_DEVICE CornerBox<typename Layout::A> candidate_corners(const CandidateSource& source, int64_t image,
                                                                          int64_t n, bool promoted) {
  using A = typename Layout::A;
  const auto keep = [](A x) { return x; };
  if (n >= source.anchors) {
    const float* row = source.labels + (n - source.anchors) * 6;
    return corners(CenterBox<A>{A(row[2]), A(row[3]), A(row[4]), A(row[5])}, keep);
  }
  const CenterBox<A> box = Layout::box(source, Layout::anchor(source, image, n));
  if (promoted) return corners(box, keep);
  return corners(box, [](A x) { return Storage<typename Layout::Stored>::round(x); });
}

template <typename Layout>
TORCH_FASTDET_HOST_DEVICE typename Layout::A candidate_extra(const CandidateSource& source, const NmsOptions& options,
                                                             int64_t image, int64_t n, int64_t e, bool promoted) {
  using A = typename Layout::A;
  if (n >= source.anchors) return A(0);
  const auto anchor = Layout::anchor(source, image, n);
  const A value = Layout::extra(source, anchor, e);
  if (!source.has_objectness) return value;
  A objectness = 0;
  Layout::objectness(source, anchor, options, objectness);
  return confidence<Layout>(source, objectness, value, promoted);
}

// Return the extra column as the output has it: given the image's row `letterbox`, keypoints are in original pixels.
template <typename Layout>
TORCH_FASTDET_HOST_DEVICE typename Layout::A detection_extra(const CandidateSource& source, const NmsOptions& options,
                                                             int64_t image, int64_t n, int64_t e, bool promoted,
                                                             const typename Layout::A* letterbox) {
  using A = typename Layout::A;
  const A value = candidate_extra<Layout>(source, options, image, n, e, promoted);
  if constexpr (Layout::kHasKeypoints) {
    const int64_t kind = letterbox && source.keypoint_values ? e % source.keypoint_values : 2;
    if (kind < 2) return clamp(div_rn(sub_rn(value, letterbox[2 + kind]), letterbox[kind]), A(0), letterbox[4 + kind]);
  }
  return value;
}

// Return the row of an image in NmsOutput::letterboxes, or null.
template <typename A>
TORCH_FASTDET_HOST_DEVICE const A* letterbox_row(const NmsOutput& output, int64_t image) {
  return output.letterboxes ? static_cast<const A*>(output.letterboxes) + image * 6 : nullptr;
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE Letterbox<A> letterbox_of(const A* row) {
  return {row[0], row[1], row[2], row[3], row[4], row[5]};
}

}  // namespace torch_fastdet::core
