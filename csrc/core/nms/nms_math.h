// Make the decisions of non-maximum suppression with the same code on the CPU and the GPU.
#pragma once

#include "core/common/exact_math.h"
#include "core/common/yolo_math.h"

namespace torch_fastdet::core {

enum class ClassRule : int32_t {
  kOffset,    // move boxes by class * max_wh before comparing them, as the original functions do
  kExact,     // compare only boxes of the same class, without moving them
  kAgnostic,  // compare all boxes
};

template <typename A>
TORCH_FASTDET_HOST_DEVICE A area(const CornerBox<A>& box) {
  return mul_rn(sub_rn(box.x2, box.x1), sub_rn(box.y2, box.y1));
}

// Return whether two boxes intersect, for overlaps(). A box without positive sides intersects nothing.
template <typename A>
TORCH_FASTDET_HOST_DEVICE bool meets(const CornerBox<A>& a, const CornerBox<A>& b) {
  const A left = a.x1 > b.x1 ? a.x1 : b.x1, right = a.x2 < b.x2 ? a.x2 : b.x2;
  const A top = a.y1 > b.y1 ? a.y1 : b.y1, bottom = a.y2 < b.y2 ? a.y2 : b.y2;
  return right > left && bottom > top;
}

// Return the box, or if it has no area a void box, which fails every comparison in proper_boxes_meet().
template <typename A>
TORCH_FASTDET_HOST_DEVICE CornerBox<A> proper_or_void(const CornerBox<A>& box) {
  const A infinity = static_cast<A>(HUGE_VAL);
  if (box.x2 > box.x1 && box.y2 > box.y1) return box;
  return {infinity, infinity, -infinity, -infinity};
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE bool proper_boxes_meet(const CornerBox<A>& a, const CornerBox<A>& b) {
  // Do not short-circuit: a branch costs more than three comparisons.
  return (a.x1 < b.x2) & (b.x1 < a.x2) & (a.y1 < b.y2) & (b.y1 < a.y2);
}

// Return IoU > threshold for two boxes that intersect. Every device rounds the quotient before comparing it.
template <typename A>
TORCH_FASTDET_HOST_DEVICE bool meeting_boxes_overlap(const CornerBox<A>& kept, const CornerBox<A>& later, A threshold) {
  const A left = kept.x1 > later.x1 ? kept.x1 : later.x1, right = kept.x2 < later.x2 ? kept.x2 : later.x2;
  const A top = kept.y1 > later.y1 ? kept.y1 : later.y1, bottom = kept.y2 < later.y2 ? kept.y2 : later.y2;
  const A intersection = mul_rn(sub_rn(right, left), sub_rn(bottom, top));
  return div_rn(intersection, sub_rn(add_rn(area(kept), area(later)), intersection)) > threshold;
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE bool overlaps(const CornerBox<A>& kept, const CornerBox<A>& later, A threshold) {
  return meets(kept, later) && meeting_boxes_overlap(kept, later, threshold);
}

// Return box corners rounded as the original functions do: Round rounds every operation to the stored type.
template <typename Round, typename A>
TORCH_FASTDET_HOST_DEVICE CornerBox<A> corners(const CenterBox<A>& box, Round round) {
  const A half_width = round(mul_rn(box.width, A(0.5))), half_height = round(mul_rn(box.height, A(0.5)));
  return {round(sub_rn(box.x, half_width)), round(sub_rn(box.y, half_height)), round(add_rn(box.x, half_width)),
          round(add_rn(box.y, half_height))};
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE bool is_finite(const CornerBox<A>& box) {
  return is_finite(box.x1) && is_finite(box.y1) && is_finite(box.x2) && is_finite(box.y2);
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE CornerBox<A> moved(const CornerBox<A>& box, A offset) {
  return {add_rn(box.x1, offset), add_rn(box.y1, offset), add_rn(box.x2, offset), add_rn(box.y2, offset)};
}

}  // namespace torch_fastdet::core
