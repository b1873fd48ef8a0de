// These functions compute SGD, Adam, Muon's momentum, the moving average, unscaling and clipping for one element, and a
// step's few scalars. CPU, CUDA and tests share them.
//
// They round every multiplication and addition where PyTorch's own loops do, so that float32 and float64 results are
// bitwise equal to torch.optim.SGD: `a.add(b, alpha=s)` is one fma, `a.mul(s)` and `a.add(b)` round once each. The
// named functions keep nvcc from contracting operations that must stay separate.
#pragma once

#include <cmath>

#include "core/common/exact_math.h"
#include "core/common/host_device.h"
#include "core/multi_tensor/multi_tensor.h"

namespace torch_fastdet::core {

// Return a * b + c, rounded once.
TORCH_FASTDET_HOST_DEVICE float fused_mul_add(float a, float b, float c) {
  return fmaf(a, b, c);
}
TORCH_FASTDET_HOST_DEVICE double fused_mul_add(double a, double b, double c) {
  return fma(a, b, c);
}

template <typename A>
struct SgdScalars {
  A lr, momentum, one_minus_dampening, weight_decay;
  bool nesterov, maximize;
};

// Take one step of torch.optim.SGD. An `unfilled` momentum buffer is set to the gradient, undamped.
template <typename A>
TORCH_FASTDET_HOST_DEVICE void sgd_element(A& param, A grad, A& buffer, const SgdScalars<A>& s, bool has_momentum,
                                           bool unfilled) {
  if (s.maximize) grad = -grad;
  if (s.weight_decay != A(0)) grad = fused_mul_add(s.weight_decay, param, grad);
  if (has_momentum) {
    buffer = unfilled ? grad : fused_mul_add(s.one_minus_dampening, grad, mul_rn(buffer, s.momentum));
    grad = s.nesterov ? fused_mul_add(s.momentum, buffer, grad) : buffer;
  }
  param = fused_mul_add(-s.lr, grad, param);
}

// Hold one group's hyperparameters and the values that follow from the number of this step.
template <typename A>
struct AdamScalars {
  A beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps, weight_decay, kept;
  bool decoupled, maximize;
};

// `steps` is the number of this step, counted from 1.
template <typename A>
TORCH_FASTDET_HOST_DEVICE AdamScalars<A> adam_scalars(double lr, double beta1, double beta2, double weight_decay,
                                                      double eps, bool decoupled, bool maximize, double steps) {
  AdamScalars<A> s{};
  s.beta1 = static_cast<A>(beta1);
  s.one_minus_beta1 = static_cast<A>(1.0 - beta1);
  s.beta2 = static_cast<A>(beta2);
  s.one_minus_beta2 = static_cast<A>(1.0 - beta2);
  s.step_size = static_cast<A>(lr / (1.0 - pow(beta1, steps)));
  s.inverse_root = static_cast<A>(1.0 / sqrt(1.0 - pow(beta2, steps)));
  s.eps = static_cast<A>(eps);
  s.weight_decay = static_cast<A>(weight_decay);
  s.kept = static_cast<A>(1.0 - lr * weight_decay);
  s.decoupled = decoupled;
  s.maximize = maximize;
  return s;
}

TORCH_FASTDET_HOST_DEVICE float square_root(float x) {
  return sqrtf(x);
}
TORCH_FASTDET_HOST_DEVICE double square_root(double x) {
  return sqrt(x);
}

// Take one step of torch.optim.Adam or AdamW. Like lerp, compute the first moment from the nearer end.
template <typename A>
TORCH_FASTDET_HOST_DEVICE void adam_element(A& param, A grad, A& first, A& second, const AdamScalars<A>& s) {
  if (s.maximize) grad = -grad;
  if (s.decoupled) {
    param = mul_rn(param, s.kept);
  } else if (s.weight_decay != A(0)) {
    grad = fused_mul_add(s.weight_decay, param, grad);
  }
  const A way = grad - first;
  first =
      s.one_minus_beta1 < A(0.5) ? fused_mul_add(s.one_minus_beta1, way, first) : fused_mul_add(-s.beta1, way, grad);
  second = fused_mul_add(mul_rn(s.one_minus_beta2, grad), grad, mul_rn(second, s.beta2));
  const A root = fused_mul_add(square_root(second), s.inverse_root, s.eps);
  param = fused_mul_add(-s.step_size, first / root, param);
}

// Update Muon's momentum, b *= m; b += (1 - m) * g, and return what Muon orthogonalizes.
template <typename A>
TORCH_FASTDET_HOST_DEVICE A muon_element(A grad, A& buffer, A momentum, A one_minus_momentum, bool nesterov) {
  buffer = fused_mul_add(one_minus_momentum, grad, mul_rn(buffer, momentum));
  return nesterov ? fused_mul_add(one_minus_momentum, grad, mul_rn(buffer, momentum)) : buffer;
}

// Update the moving average as YOLOv5 does: v *= d; v += (1 - d) * x.
template <typename A>
TORCH_FASTDET_HOST_DEVICE A ema_element(A average, A value, A decay, A one_minus_decay) {
  return add_rn(mul_rn(average, decay), mul_rn(value, one_minus_decay));
}

// Return decay * (1 - exp(-updates / tau)), the ramp that makes early averages follow the parameters quickly.
TORCH_FASTDET_HOST_DEVICE double ema_decay(double decay, double tau, double updates) {
  return mul_rn(decay, 1.0 - exp(-updates / tau));
}

// Return 1 / scale as GradScaler computes it: in double, then rounded to float.
TORCH_FASTDET_HOST_DEVICE float inverse_scale(float scale) {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

// Return clip_grad_norm_'s factor min(max_norm / (norm + 1e-6), 1), rounded as torch rounds `float / tensor`.
template <typename A>
TORCH_FASTDET_HOST_DEVICE A clip_factor(A norm, A max_norm) {
  const A factor = mul_rn(A(1) / add_rn(norm, A(1e-6)), max_norm);
  return factor > A(1) ? A(1) : factor;
}

// Apply GradScaler.update(): back off on overflow, grow after `interval` steps without one, never to infinity.
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

TORCH_FASTDET_HOST_DEVICE DType slot_type(const Row& row, int slot) {
  return static_cast<DType>(row.dtype[slot]);
}

TORCH_FASTDET_HOST_DEVICE bool has_double(const Row& row) {
  bool found = false;
  for (int slot = 0; slot < kSlots; ++slot) {
    found = found || (row.data[slot] && slot_type(row, slot) == DType::kFloat64);
  }
  return found;
}

// Store the norm, the flags and what the update reads in `w`. `sum` is the sum of the squares of all gradients.
TORCH_FASTDET_HOST_DEVICE void finish_reduction(const ReduceParams& p, Workspace& w, bool overflow, double sum) {
  if (p.found_inf && (overflow || !p.keep_found_inf)) *p.found_inf = overflow ? 1.f : 0.f;
  w.skip = overflow && p.skip_on_overflow;
  w.inv_scale = p.scale ? inverse_scale(*p.scale) : 1.f;
  const double norm = sqrt(sum);
  if (p.norm_dtype == DType::kFloat64) {
    if (p.norm) *static_cast<double*>(p.norm) = norm;
    w.clip = p.clip ? clip_factor(norm, p.max_norm) : 1.0;
  } else {
    if (p.norm) *static_cast<float*>(p.norm) = static_cast<float>(norm);
    w.clip = p.clip ? clip_factor(static_cast<float>(norm), static_cast<float>(p.max_norm)) : 1.f;
  }
  if (p.new_scale) {
    update_scale(*p.new_scale, *p.growth_tracker, overflow, p.growth_factor, p.backoff_factor, p.growth_interval);
  }
}

// All elements of an update share these scalars.
struct StepScalars {
  double clip, decay, one_minus_decay;
  float inv_scale;
  bool scaled, clipped, skip;
};

// `decay` is the value of p.decay, and `updates` is the number of this update.
TORCH_FASTDET_HOST_DEVICE StepScalars step_scalars(const UpdateParams& p, const Workspace& w, double decay,
                                                   int64_t updates) {
  StepScalars s{};
  s.skip = (p.use_workspace && w.skip) || (p.found_inf && *p.found_inf != 0.f);
  s.inv_scale = p.grad_scale ? inverse_scale(*p.grad_scale) : p.use_workspace ? w.inv_scale : 1.f;
  s.scaled = s.inv_scale != 1.f;
  s.clip = p.use_workspace ? w.clip : 1.0;
  s.clipped = s.clip != 1.0;
  if (p.ema) {
    s.decay = p.tau > 0 ? ema_decay(decay, p.tau, static_cast<double>(updates)) : decay;
    s.one_minus_decay = 1.0 - s.decay;
  }
  return s;
}

// Record that a row has taken its step: its buffer is initialized, and Adam's step count grows by one.
TORCH_FASTDET_HOST_DEVICE void finish_row(const UpdateParams& p, const Row& row, int64_t index) {
  if (p.unfilled && row.data[kGrad] && row.data[kMomentum]) p.unfilled[index] = 0;
  if (p.rule == Rule::kAdam && row.step) *row.step += 1.f;
}

}  // namespace torch_fastdet::core
