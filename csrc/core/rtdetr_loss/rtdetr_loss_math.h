// Compute costs, terms and gradients of RT-DETR's loss. A is float or double; boxes are shares of the image, as xywh.
#pragma once

#include "core/boxes/box_math.h"
#include "core/common/exact_math.h"
#include "core/common/log_math.h"
#include "core/common/yolo_math.h"

namespace torch_fastdet::core {

// These factors of the negative classes' entropy are for a batch with targets and for one without.
constexpr double kRtdetrAlpha = 0.25, kRtdetrAlphaWithoutTargets = 0.75;

template <typename A>
TORCH_FASTDET_HOST_DEVICE constexpr A rtdetr_eps() {
  return A(1e-7);
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE A rtdetr_distance(const A (&box)[4], const A (&target)[4]) {
  A sum = 0;
  for (int i = 0; i < 4; ++i) sum += magnitude(box[i] - target[i]);
  return sum;
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE IouTerms<A> rtdetr_overlap(const A (&box)[4], const A (&target)[4]) {
  return iou_terms<IouKind::kGiou>(make_box(box, true, rtdetr_eps<A>()), make_box(target, true, rtdetr_eps<A>()),
                                   rtdetr_eps<A>());
}

// Return the focal cost of a class (Lin et al., 2017) with alpha 0.25 and gamma 2, minus that of its absence.
template <typename A>
TORCH_FASTDET_HOST_DEVICE A rtdetr_class_cost(A logit) {
  const A p = sigmoid(logit), rest = A(1) - p;
  return A(0.75) * p * p * log_rn(rest + A(1e-8)) - A(0.25) * rest * rest * log_rn(p + A(1e-8));
}

// Return 0 if the cost is not finite. `gains` are those of class, box and GIoU.
template <typename A>
TORCH_FASTDET_HOST_DEVICE A rtdetr_cost(const A (&box)[4], A class_cost, const A (&target)[4], const A (&gains)[3]) {
  const A cost = gains[0] * class_cost + gains[1] * rtdetr_distance(box, target) +
                 gains[2] * (A(1) - rtdetr_overlap(box, target).value);
  return is_finite(cost) ? cost : A(0);
}

// Return log(1 + exp(x)).
template <typename A>
TORCH_FASTDET_HOST_DEVICE A rtdetr_softplus(A x) {
  const A rest = log1p_of_share(exp_rn(-magnitude(x)));
  return x > A(0) ? x + rest : rest;
}

// Return the varifocal entropy (Zhang et al., 2021) of a negative class, with gamma 1.5.
template <typename A>
TORCH_FASTDET_HOST_DEVICE A rtdetr_negative(A logit, A alpha) {
  const A p = sigmoid(logit);
  return alpha * p * sqrt_rn(p) * rtdetr_softplus(logit);
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE A rtdetr_negative_gradient(A logit, A alpha) {
  const A p = sigmoid(logit);
  return alpha * p * sqrt_rn(p) * (A(1.5) * (A(1) - p) * rtdetr_softplus(logit) + p);
}

// Return the entropy of the positive class, whose target is the overlap of the boxes.
template <typename A>
TORCH_FASTDET_HOST_DEVICE A rtdetr_positive(A logit, A quality) {
  return quality * (rtdetr_softplus(logit) - quality * logit);
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE A rtdetr_positive_gradient(A logit, A quality) {
  return quality * (sigmoid(logit) - quality);
}

// Compute the gradient of box_scale * distance + giou_scale * (1 - GIoU) with respect to a box.
template <typename A>
TORCH_FASTDET_HOST_DEVICE void rtdetr_box_gradient(const A (&box)[4], const A (&target)[4], A box_scale, A giou_scale,
                                                   A (&out)[4]) {
  const A eps = rtdetr_eps<A>();
  Box<A> by_box, by_target;
  box_iou_grad<IouKind::kGiou>(make_box(box, true, eps), make_box(target, true, eps), eps, -giou_scale, by_box,
                               by_target);
  fold_box_grad(by_box, true, out);
  for (int i = 0; i < 4; ++i) {
    const A away = box[i] - target[i];
    out[i] += away > A(0) ? box_scale : away < A(0) ? -box_scale : A(0) * away;
  }
}

}  // namespace torch_fastdet::core
