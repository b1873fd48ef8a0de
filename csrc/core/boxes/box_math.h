// Compute IoU, GIoU, DIoU and CIoU of one pair of boxes, values and gradients. These formulas are defined only here,
// for the CPU and CUDA kernels and the unit tests. T is float or double. Everything is branch-free, so that loops over
// these functions vectorise.
//
// Definitions (a and b are the boxes, C their smallest enclosing box, eps keeps every denominator above zero):
//   IoU  = I / U,                       I = area of the intersection, U = area(a) + area(b) - I + eps
//   GIoU = IoU - (|C| - U) / |C|,       |C| = cw ch + eps
//   DIoU = IoU - rho^2 / c^2,           rho = distance of the centers, c^2 = cw^2 + ch^2 + eps
//   CIoU = DIoU - alpha v,              v = 4/pi^2 (atan(wb/hb) - atan(wa/ha))^2, alpha = v / (1 - IoU + v + eps)
// alpha is a constant in the gradient, as in the paper (Zheng et al., Distance-IoU Loss, 2019).
// Subgradients: the min or max of equal corners splits its gradient evenly, and a clamp passes it on at its bound.
#pragma once

#include <cmath>

#include "core/common/host_device.h"

namespace torch_fastdet::core {

enum class IouKind : int { kIou, kGiou, kDiou, kCiou };

// Width and height, for area and aspect ratio, are the inputs of an xywh box. An xyxy box adds eps to its height.
template <typename T>
struct Box {
  T x1, y1, x2, y2, w, h;
};

template <typename T>
TORCH_FASTDET_HOST_DEVICE Box<T> box_from_xywh(T x, T y, T w, T h) {
  return {x - w * T(0.5), y - h * T(0.5), x + w * T(0.5), y + h * T(0.5), w, h};
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE Box<T> box_from_xyxy(T x1, T y1, T x2, T y2, T eps) {
  return {x1, y1, x2, y2, x2 - x1, y2 - y1 + eps};
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE Box<T> make_box(const T (&v)[4], bool xywh, T eps) {
  return xywh ? box_from_xywh(v[0], v[1], v[2], v[3]) : box_from_xyxy(v[0], v[1], v[2], v[3], eps);
}

// Fold the gradient of the six fields of Box into the gradient of the four input coordinates.
template <typename T>
TORCH_FASTDET_HOST_DEVICE void fold_box_grad(const Box<T>& g, bool xywh, T (&out)[4]) {
  out[0] = xywh ? g.x1 + g.x2 : g.x1 - g.w;
  out[1] = xywh ? g.y1 + g.y2 : g.y1 - g.h;
  out[2] = xywh ? (g.x2 - g.x1) * T(0.5) + g.w : g.x2 + g.w;
  out[3] = xywh ? (g.y2 - g.y1) * T(0.5) + g.h : g.y2 + g.h;
}

// Propagate NaN, unlike fmin and fmax, so that a NaN coordinate gives a NaN result on every device.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T nan_min(T a, T b) {
  return ((a < b) | (a != a)) ? a : b;
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE T nan_max(T a, T b) {
  return ((a > b) | (a != a)) ? a : b;
}

// Return a's share of the gradient of min(a, b). The rest is b's. For max(a, b), call min_share(b, a).
template <typename T>
TORCH_FASTDET_HOST_DEVICE T min_share(T a, T b) {
  return a < b ? T(1) : (a == b ? T(0.5) : T(0));
}

// Return atan(z) for 0 <= z <= 1. In float it is an odd minimax polynomial of degree 19 (relative error 2.4e-9 before
// rounding, within 1.2 ulp after it): the library's atan neither vectorises on the CPU nor is cheaper on the GPU.
TORCH_FASTDET_HOST_DEVICE float atan_unit(float z) {
  const float u = z * z;
  float p = -0.0017539279940405467f;
  p = p * u + 0.010726934426439044f;
  p = p * u - 0.03080457925525059f;
  p = p * u + 0.05755208419334889f;
  p = p * u - 0.08377314415696302f;
  p = p * u + 0.10942030313853021f;
  p = p * u - 0.14261933038139457f;
  p = p * u + 0.19998266034979642f;
  p = p * u - 0.33333283641451344f;
  return z + z * (p * u);
}

TORCH_FASTDET_HOST_DEVICE double atan_unit(double z) {
  return ::atan(z);
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE T magnitude(T x) {
  return x < T(0) ? -x : x;
}

// Return atan(w / h), its limit pi/2 at h = 0, and 0 for w = h = 0, where the ratio has no limit.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T atan_ratio(T w, T h) {
  constexpr T kHalfPi = T(1.57079632679489661923);
  const T aw = magnitude(w);
  const T ah = magnitude(h);
  const bool wide = aw > ah;
  const T longer = wide ? aw : ah;
  const T shorter = wide ? ah : aw;
  const T angle = atan_unit(shorter / (longer == T(0) ? T(1) : longer));
  const T unsigned_angle = wide ? kHalfPi - angle : angle;
  return (w < T(0)) != (h < T(0)) ? -unsigned_angle : unsigned_angle;
}

// Return 1 / (w^2 + h^2), limited to be finite if both sides vanish (the squares underflow long before the sides do).
template <typename T>
TORCH_FASTDET_HOST_DEVICE T inverse_square_sum(T w, T h) {
  constexpr T kTiny = sizeof(T) == 8 ? T(1e-290) : T(1e-30);
  const T sum = w * w + h * h;
  return T(1) / (sum < kTiny ? kTiny : sum);
}

template <typename T>
struct IouTerms {
  T raw_w, raw_h;        // size of the intersection before the clamp at 0
  T inter_w, inter_h;    // the same after the clamp
  T union_area, iou;     // union includes eps
  T hull_w, hull_h;      // the enclosing box
  T hull_area;           // includes eps; GIoU
  T shift_x, shift_y;    // twice the distance of the centers; DIoU, CIoU
  T diagonal, distance;  // c^2 (includes eps) and rho^2
  T angle, alpha;        // atan(wb/hb) - atan(wa/ha) and the weight of v; CIoU
  T value;
};

template <IouKind kKind, typename T>
TORCH_FASTDET_HOST_DEVICE IouTerms<T> iou_terms(const Box<T>& a, const Box<T>& b, T eps) {
  IouTerms<T> t;
  t.raw_w = nan_min(a.x2, b.x2) - nan_max(a.x1, b.x1);
  t.raw_h = nan_min(a.y2, b.y2) - nan_max(a.y1, b.y1);
  t.inter_w = t.raw_w < T(0) ? T(0) : t.raw_w;
  t.inter_h = t.raw_h < T(0) ? T(0) : t.raw_h;
  const T inter = t.inter_w * t.inter_h;
  t.union_area = a.w * a.h + b.w * b.h - inter + eps;
  t.iou = inter / t.union_area;
  t.value = t.iou;
  if constexpr (kKind == IouKind::kIou) return t;

  t.hull_w = nan_max(a.x2, b.x2) - nan_min(a.x1, b.x1);
  t.hull_h = nan_max(a.y2, b.y2) - nan_min(a.y1, b.y1);
  if constexpr (kKind == IouKind::kGiou) {
    t.hull_area = t.hull_w * t.hull_h + eps;
    t.value = t.iou - (t.hull_area - t.union_area) / t.hull_area;
    return t;
  }

  t.diagonal = t.hull_w * t.hull_w + t.hull_h * t.hull_h + eps;
  t.shift_x = b.x1 + b.x2 - a.x1 - a.x2;
  t.shift_y = b.y1 + b.y2 - a.y1 - a.y2;
  t.distance = (t.shift_x * t.shift_x + t.shift_y * t.shift_y) * T(0.25);
  t.value = t.iou - t.distance / t.diagonal;
  if constexpr (kKind == IouKind::kDiou) return t;

  constexpr T kFourOverPiSquared = T(0.40528473456935108578);
  t.angle = atan_ratio(b.w, b.h) - atan_ratio(a.w, a.h);
  const T v = kFourOverPiSquared * t.angle * t.angle;
  // Rounding may raise the IoU of equal boxes above 1. Without the clamp the denominator could be 0 and alpha NaN.
  const T gap = T(1) - t.iou;
  const T denominator = (gap < T(0) ? T(0) : gap) + v + eps;
  t.alpha = v / (v == T(0) ? T(1) : denominator);
  t.value = t.iou - (t.distance / t.diagonal + v * t.alpha);
  return t;
}

template <IouKind kKind, typename T>
TORCH_FASTDET_HOST_DEVICE T box_iou(const Box<T>& a, const Box<T>& b, T eps) {
  return iou_terms<kKind>(a, b, eps).value;
}

// Compute the gradients of `grad * iou` with respect to both boxes' fields, and return the value.
template <IouKind kKind, typename T>
TORCH_FASTDET_HOST_DEVICE T box_iou_grad(const Box<T>& a, const Box<T>& b, T eps, T grad, Box<T>& grad_a,
                                         Box<T>& grad_b) {
  const IouTerms<T> t = iou_terms<kKind>(a, b, eps);

  // Differentiate by the union (which contains -I), the intersection and the areas.
  T grad_union = -t.iou / t.union_area;
  if constexpr (kKind == IouKind::kGiou) grad_union += T(1) / t.hull_area;
  grad_union *= grad;
  const T grad_inter = grad / t.union_area - grad_union;
  grad_a.w = grad_union * a.h;
  grad_a.h = grad_union * a.w;
  grad_b.w = grad_union * b.h;
  grad_b.h = grad_union * b.w;

  const T grad_inter_w = t.raw_w < T(0) ? T(0) : grad_inter * t.inter_h;
  const T grad_inter_h = t.raw_h < T(0) ? T(0) : grad_inter * t.inter_w;
  const T low_x = min_share(a.x1, b.x1);  // a's share of min(x1) goes to the hull, the rest to the intersection
  const T low_y = min_share(a.y1, b.y1);
  const T high_x = min_share(b.x2, a.x2);  // a's share of max(x2)
  const T high_y = min_share(b.y2, a.y2);
  grad_a.x1 = -grad_inter_w * (T(1) - low_x);
  grad_b.x1 = -grad_inter_w * low_x;
  grad_a.y1 = -grad_inter_h * (T(1) - low_y);
  grad_b.y1 = -grad_inter_h * low_y;
  grad_a.x2 = grad_inter_w * (T(1) - high_x);
  grad_b.x2 = grad_inter_w * high_x;
  grad_a.y2 = grad_inter_h * (T(1) - high_y);
  grad_b.y2 = grad_inter_h * high_y;
  if constexpr (kKind == IouKind::kIou) return t.value;

  T grad_hull_w;
  T grad_hull_h;
  if constexpr (kKind == IouKind::kGiou) {
    const T grad_hull = -grad * (t.union_area / t.hull_area) / t.hull_area;
    grad_hull_w = grad_hull * t.hull_h;
    grad_hull_h = grad_hull * t.hull_w;
  } else {
    const T inverse = grad / t.diagonal;
    const T grad_diagonal = inverse * (t.distance / t.diagonal);
    grad_hull_w = T(2) * grad_diagonal * t.hull_w;
    grad_hull_h = T(2) * grad_diagonal * t.hull_h;
    // rho^2 = (shift_x^2 + shift_y^2) / 4, and shift is b's corners minus a's corners.
    const T grad_x = T(0.5) * inverse * t.shift_x;
    const T grad_y = T(0.5) * inverse * t.shift_y;
    grad_a.x1 += grad_x;
    grad_a.x2 += grad_x;
    grad_b.x1 -= grad_x;
    grad_b.x2 -= grad_x;
    grad_a.y1 += grad_y;
    grad_a.y2 += grad_y;
    grad_b.y1 -= grad_y;
    grad_b.y2 -= grad_y;
  }
  grad_a.x1 -= grad_hull_w * low_x;
  grad_b.x1 -= grad_hull_w * (T(1) - low_x);
  grad_a.y1 -= grad_hull_h * low_y;
  grad_b.y1 -= grad_hull_h * (T(1) - low_y);
  grad_a.x2 += grad_hull_w * high_x;
  grad_b.x2 += grad_hull_w * (T(1) - high_x);
  grad_a.y2 += grad_hull_h * high_y;
  grad_b.y2 += grad_hull_h * (T(1) - high_y);

  if constexpr (kKind == IouKind::kCiou) {
    // d/dw atan(w/h) is h / (w^2 + h^2), and d/dh is -w / (w^2 + h^2). The chain through w/h is not always finite.
    constexpr T kEightOverPiSquared = T(0.81056946913870217156);
    const T slope = grad * t.alpha * kEightOverPiSquared * t.angle;
    const T slope_a = slope * inverse_square_sum(a.w, a.h);
    const T slope_b = slope * inverse_square_sum(b.w, b.h);
    grad_a.w += slope_a * a.h;
    grad_a.h -= slope_a * a.w;
    grad_b.w -= slope_b * b.h;
    grad_b.h += slope_b * b.w;
  }
  return t.value;
}

}  // namespace torch_fastdet::core
