// Compute the loss of oriented boxes, probiou and its gradient, one box or one anchor at a time.
#pragma once

#include <math.h>

#include "core/common/exact_math.h"
#include "core/common/yolo_math.h"
#include "core/v8_loss/v8_loss_math.h"

namespace torch_fastdet::core {

constexpr float kV8LeastObbSide = 2.f;  // pixels: targets with a shorter side are ignored
constexpr double kV8ObbFloor = 0.01;    // added to both variances in the box part, in square cells

// Describe a box that is rotated by `angle` (radians) around its center.
template <typename T>
struct V8Obb {
  T x, y, w, h, angle;
};

// Hold a box's Gaussian: its covariance [[a, c], [c, b]], the variances along its own axes, and the axes.
template <typename T>
struct V8Gaussian {
  T a, b, c, along, across;
  Direction<T> axis;
};

template <typename T>
TORCH_FASTDET_HOST_DEVICE V8Gaussian<T> v8_gaussian(const V8Obb<T>& box, T floor) {
  const Direction<T> d = direction_of(box.angle);
  const T along = box.w * box.w / T(12) + floor, across = box.h * box.h / T(12) + floor;
  const T cos2 = d.cosine * d.cosine, sin2 = d.sine * d.sine;
  return {along * cos2 + across * sin2,
          along * sin2 + across * cos2,
          (along - across) * d.cosine * d.sine,
          along,
          across,
          d};
}

template <typename T>
struct V8Probiou {
  T value;
  T by_distance;  // d(value) / d(Bhattacharyya distance); 0 if that is clamped
  T x, y, determinant, numerator, own, ratio, quotient;
};

template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_determinant(const V8Gaussian<T>& g) {
  const T determinant = g.a * g.b - g.c * g.c;
  return determinant < T(0) ? T(0) : determinant;
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE V8Probiou<T> v8_probiou(const V8Obb<T>& box, const V8Gaussian<T>& g, const V8Obb<T>& other,
                                                  const V8Gaussian<T>& h) {
  constexpr T kEps = T(1e-7);
  V8Probiou<T> r{};
  r.x = box.x - other.x;
  r.y = box.y - other.y;
  const T a = g.a + h.a, b = g.b + h.b, c = g.c + h.c;
  const T determinant = a * b - c * c;
  r.determinant = determinant + kEps;
  r.numerator = T(0.25) * (a * r.y * r.y + b * r.x * r.x) - T(0.5) * c * r.x * r.y;
  r.own = v8_determinant(g);
  r.quotient = T(4) * sqrt(r.own * v8_determinant(h)) + kEps;
  r.ratio = determinant / r.quotient + kEps;
  const T distance = r.numerator / r.determinant + T(0.5) * log(r.ratio);
  const bool clamped = distance < kEps || distance > T(100);
  const T clipped = distance < kEps ? kEps : distance > T(100) ? T(100) : distance;
  const T left = exp_rn(-clipped), root = sqrt(T(1) - left + kEps);
  r.value = T(1) - root;
  r.by_distance = clamped ? T(0) : T(-0.5) * left / root;
  return r;
}

// Add `gradient` times d(probiou) / d(box) to x, y, w, h, angle.
template <typename T>
TORCH_FASTDET_HOST_DEVICE void v8_probiou_gradient(const V8Probiou<T>& r, const V8Obb<T>& box, const V8Gaussian<T>& g,
                                                   const V8Gaussian<T>& h, T gradient, V8Obb<T>& by) {
  const T scale = gradient * r.by_distance;
  if (scale == T(0)) return;
  const T a = g.a + h.a, b = g.b + h.b, c = g.c + h.c, inverse = T(1) / r.determinant;
  // The first is by the determinant of the sum, from both terms; the second is by that of the box's own covariance.
  const T by_determinant = -r.numerator * inverse * inverse + T(0.5) / (r.ratio * r.quotient);
  const T root = sqrt(r.own * v8_determinant(h));
  const T by_quotient = T(-0.5) * (r.determinant - T(1e-7)) / (r.ratio * r.quotient * r.quotient);
  const T by_own = root > T(0) ? by_quotient * T(2) * v8_determinant(h) / root : T(0);
  const T by_a = T(0.25) * r.y * r.y * inverse + by_determinant * b + by_own * g.b;
  const T by_b = T(0.25) * r.x * r.x * inverse + by_determinant * a + by_own * g.a;
  const T by_c = T(-0.5) * r.x * r.y * inverse - T(2) * (by_determinant * c + by_own * g.c);
  const T cosine = g.axis.cosine, sine = g.axis.sine, cos2 = cosine * cosine, sin2 = sine * sine, both = cosine * sine;
  by.x += scale * (T(0.5) * b * r.x - T(0.5) * c * r.y) * inverse;
  by.y += scale * (T(0.5) * a * r.y - T(0.5) * c * r.x) * inverse;
  by.w += scale * (by_a * cos2 + by_b * sin2 + by_c * both) * box.w / T(6);
  by.h += scale * (by_a * sin2 + by_b * cos2 - by_c * both) * box.h / T(6);
  by.angle += scale * (g.along - g.across) * (T(2) * both * (by_b - by_a) + by_c * (cos2 - sin2));
}

// Read a target in pixels: x1, y1, x2, y2 hold center, width and height; anchors may be between low and high. Return
// false for one that the original ignores: a side is below two pixels, or its numbers add up to 0 or less.
TORCH_FASTDET_HOST_DEVICE bool v8_obb_target(const float row[7], float image_w, float image_h, V8Sides sides,
                                             int64_t classes, V8Target& target) {
  target.x1 = mul_rn(row[2], image_w);
  target.y1 = mul_rn(row[3], image_h);
  target.x2 = mul_rn(row[4], image_w);
  target.y2 = mul_rn(row[5], image_h);
  const float w = target.x2 < sides.below ? sides.least : target.x2;
  const float h = target.y2 < sides.below ? sides.least : target.y2;
  const Direction<float> d = direction_of(row[6]);
  const float reach_x = (w * fabsf(d.cosine) + h * fabsf(d.sine)) * 0.5f;
  const float reach_y = (w * fabsf(d.sine) + h * fabsf(d.cosine)) * 0.5f;
  target.low_x = target.x1 - reach_x;
  target.high_x = target.x1 + reach_x;
  target.low_y = target.y1 - reach_y;
  target.high_y = target.y1 + reach_y;
  target.image = static_cast<int32_t>(row[0]);
  const auto label = static_cast<int32_t>(row[1]);
  target.lookup = label < 0 ? label + static_cast<int32_t>(classes) : label;
  target.label = label < 0 ? 0 : label;
  const float sum = add_rn(add_rn(add_rn(target.x1, target.y1), add_rn(target.x2, target.y2)), row[6]);
  return target.x2 >= kV8LeastObbSide && target.y2 >= kV8LeastObbSide && sum > 0.f;
}

// Return whether a point lies inside a target or on its border; short sides are enlarged.
TORCH_FASTDET_HOST_DEVICE bool v8_obb_inside(const V8Target& target, float angle, V8Sides sides, float x, float y) {
  if (!(x >= target.low_x - 1.f && x <= target.high_x + 1.f && y >= target.low_y - 1.f && y <= target.high_y + 1.f)) {
    return false;
  }
  const Direction<float> d = direction_of(angle);
  const float w = target.x2 < sides.below ? sides.least : target.x2;
  const float h = target.y2 < sides.below ? sides.least : target.y2;
  const float dx = x - target.x1, dy = y - target.y1;
  return fabsf(dx * d.cosine + dy * d.sine) <= w * 0.5f && fabsf(dy * d.cosine - dx * d.sine) <= h * 0.5f;
}

// Return the weighted error of an angle, which is 0 for a square, and its gradient by the predicted angle.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T v8_angle_term(T w, T h, T difference, T& gradient) {
  const T stretch = log(w / h);
  const T weight = exp_rn(-(stretch * stretch) / T(9));
  const Direction<T> d = direction_of(T(2) * difference);
  gradient = weight * T(4) * d.sine * d.cosine;
  return weight * d.sine * d.sine;
}

}  // namespace torch_fastdet::core
