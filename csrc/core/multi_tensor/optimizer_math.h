// SGD, moving average, unscale and clip for one element, and the step's few scalars. Once, for CPU, CUDA and tests.
//
// Every multiplication and addition is rounded where PyTorch's own loops round it, so that float32 and float64 results
// are torch.optim.SGD's bits: `a.add(b, alpha=s)` is one fma, `a.mul(s)` and `a.add(b)` are one rounding each. The
// named functions keep nvcc from contracting what must stay apart.
#pragma once

#include <cmath>

#include "core/common/exact_math.h"
#include "core/common/host_device.h"

namespace torch_fastdet::core {

// a * b + c, rounded once.
TORCH_FASTDET_HOST_DEVICE float fused_mul_add(float a, float b, float c) {
  return fmaf(a, b, c);
}
TORCH_FASTDET_HOST_DEVICE double fused_mul_add(double a, double b, double c) {
  return fma(a, b, c);
}

// One group's hyper-parameters in the arithmetic type.
template <typename A>
struct SgdScalars {
  A lr, momentum, one_minus_dampening, weight_decay;
  bool nesterov, maximize;
};

// One step of torch.optim.SGD. `fresh`: the momentum buffer holds nothing yet and becomes the gradient, undamped.
template <typename A>
TORCH_FASTDET_HOST_DEVICE void sgd_element(A& param, A grad, A& buffer, const SgdScalars<A>& s, bool has_momentum,
                                           bool fresh) {
  if (s.maximize) grad = -grad;
  if (s.weight_decay != A(0)) grad = fused_mul_add(s.weight_decay, param, grad);
  if (has_momentum) {
    buffer = fresh ? grad : fused_mul_add(s.one_minus_dampening, grad, mul_rn(buffer, s.momentum));
    grad = s.nesterov ? fused_mul_add(s.momentum, buffer, grad) : buffer;
  }
  param = fused_mul_add(-s.lr, grad, param);
}

// The moving average as YOLOv5 writes it: v *= d; v += (1 - d) * x.
template <typename A>
TORCH_FASTDET_HOST_DEVICE A ema_element(A average, A value, A decay, A one_minus_decay) {
  return add_rn(mul_rn(average, decay), mul_rn(value, one_minus_decay));
}

// decay * (1 - exp(-updates / tau)), the ramp that lets early epochs move.
TORCH_FASTDET_HOST_DEVICE double ema_decay(double decay, double tau, double updates) {
  return mul_rn(decay, 1.0 - exp(-updates / tau));
}

// 1 / scale as GradScaler takes it: in double, then float.
TORCH_FASTDET_HOST_DEVICE float inverse_scale(float scale) {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

// clip_grad_norm_'s factor, min(max_norm / (norm + 1e-6), 1), rounded as torch rounds `float / tensor`. NaN stays NaN.
template <typename A>
TORCH_FASTDET_HOST_DEVICE A clip_factor(A norm, A max_norm) {
  const A factor = mul_rn(A(1) / add_rn(norm, A(1e-6)), max_norm);
  return factor > A(1) ? A(1) : factor;
}

// GradScaler.update(): back off on overflow, grow after `interval` steps without one, never to infinity.
TORCH_FASTDET_HOST_DEVICE void update_scale(float& scale, int& growth_tracker, bool overflow, double growth_factor,
                                            double backoff_factor, int interval) {
  if (overflow) {
    scale = static_cast<float>(static_cast<double>(scale) * backoff_factor);
    growth_tracker = 0;
    return;
  }
  if (++growth_tracker != interval) return;
  const float grown = static_cast<float>(static_cast<double>(scale) * growth_factor);
  if (grown <= 3.402823466e38f) scale = grown;
  growth_tracker = 0;
}

}  // namespace torch_fastdet::core
