// Compare rotated boxes as suppression does: by probiou, the similarity of Gaussians that have the boxes' spread
// (https://arxiv.org/abs/2106.06072). The formula follows the order of the original's float32 operations.
#pragma once

#include <cmath>

#include "core/common/exact_math.h"
#include "core/common/yolo_math.h"
#include "core/nms/candidates.h"

namespace torch_fastdet::core {

template <typename A>
struct alignas(16) RotatedBox {
  A x, y;   // center, as compared
  A reach;  // two boxes whose centers are further apart than sqrt(reach + reach) do not overlap
  A determinant;
  A a, b, c;  // covariance [[a, c], [c, b]]
  A unused;
};

// Return RotatedBox::reach for boxes whose longest side is 1, with a margin for the rounding of every step.
//
// With S = S1 + S2 the distance of the Gaussians is d' S^-1 d / 4 (their log term is 0 or more). This is at least 3
// |d|^2 / (side1^2 + side2^2), because the largest spread of S is at most (side1^2 + side2^2) / 12. Boxes overlap by
// more than t only if their distance is below -log(1 - (1 - t)^2).
inline double reach_scale_of(double iou_threshold) {
  const double share = 1 + 1e-7 - (1 - iou_threshold) * (1 - iou_threshold) - 1e-6;
  if (!(share > 0)) return HUGE_VAL;
  const double distance = share < 1 ? -std::log(share) : 0;
  return (distance + 2e-3) * 1.01 / 3;
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE bool is_finite(const RotatedCandidate<A>& candidate) {
  return is_finite(candidate.box.x) && is_finite(candidate.box.y) && is_finite(candidate.box.width) &&
         is_finite(candidate.box.height) && is_finite(candidate.angle);
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE RotatedBox<A> place_rotated(const RotatedCandidate<A>& candidate, A offset, A reach_scale) {
  const CenterBox<A>& box = candidate.box;
  const Direction<A> d = direction_of(candidate.angle);
  const A cos2 = mul_rn(d.cosine, d.cosine), sin2 = mul_rn(d.sine, d.sine);
  const A along = div_rn(mul_rn(box.width, box.width), A(12));
  const A across = div_rn(mul_rn(box.height, box.height), A(12));
  RotatedBox<A> placed;
  placed.x = add_rn(box.x, offset);
  placed.y = add_rn(box.y, offset);
  placed.a = add_rn(mul_rn(along, cos2), mul_rn(across, sin2));
  placed.b = add_rn(mul_rn(along, sin2), mul_rn(across, cos2));
  placed.c = mul_rn(mul_rn(sub_rn(along, across), d.cosine), d.sine);
  const A product = mul_rn(placed.a, placed.b);
  const A determinant = sub_rn(product, mul_rn(placed.c, placed.c));
  placed.determinant = determinant < 0 ? A(0) : determinant;
  // The bound holds for accurate, large covariances; others (below a pixel, 60 times as long as wide) are near all.
  const bool bounded = determinant >= mul_rn(product, A(1e-3)) && determinant >= A(1e-3);
  const A longest = mul_rn(along > across ? along : across, A(12));
  placed.reach = bounded ? mul_rn(longest, reach_scale) : static_cast<A>(HUGE_VAL);
  placed.unused = 0;
  return placed;
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE RotatedBox<A> no_rotated_box() {
  return {A(0), A(0), -static_cast<A>(HUGE_VAL), A(0), A(0), A(0), A(0), A(0)};
}

// Return whether two boxes may overlap. A box that overlaps nothing makes the sum of reaches negative or NaN.
template <typename A>
TORCH_FASTDET_HOST_DEVICE bool rotated_boxes_near(const RotatedBox<A>& first, const RotatedBox<A>& second) {
  const A x = first.x - second.x, y = first.y - second.y;
  return x * x + y * y <= first.reach + second.reach;
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE A probiou(const RotatedBox<A>& first, const RotatedBox<A>& second) {
  const A eps = A(1e-7);
  const A x = sub_rn(second.x, first.x), y = sub_rn(first.y, second.y);
  const A a = add_rn(first.a, second.a), b = add_rn(first.b, second.b), c = add_rn(first.c, second.c);
  const A determinant = sub_rn(mul_rn(a, b), mul_rn(c, c)), safe = add_rn(determinant, eps);
  const A squares = add_rn(mul_rn(a, mul_rn(y, y)), mul_rn(b, mul_rn(x, x)));
  const A apart = mul_rn(div_rn(squares, safe), A(0.25));
  const A mixed = mul_rn(div_rn(mul_rn(mul_rn(c, x), y), safe), A(0.5));
  const A both = mul_rn(sqrt_rn(mul_rn(first.determinant, second.determinant)), A(4));
  const A spreads = mul_rn(log_rn(add_rn(div_rn(determinant, add_rn(both, eps)), eps)), A(0.5));
  A distance = add_rn(add_rn(apart, mixed), spreads);
  distance = distance < eps ? eps : (distance > A(100) ? A(100) : distance);
  return sub_rn(A(1), sqrt_rn(add_rn(sub_rn(A(1), exp_rn(-distance)), eps)));
}

// Return whether a box suppresses a later one. NaN does not suppress.
template <typename A>
TORCH_FASTDET_HOST_DEVICE bool rotated_boxes_overlap(const RotatedBox<A>& first, const RotatedBox<A>& second,
                                                     A threshold) {
  return rotated_boxes_near(first, second) && probiou(first, second) > threshold;
}

}  // namespace torch_fastdet::core
