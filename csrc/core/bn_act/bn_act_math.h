// Compute the activations that follow a BatchNorm2d and their gradients, for the CPU, the GPU and the unit tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/common/host_device.h"

namespace torch_fastdet::core {

enum class Activation : int32_t { kIdentity, kSiLU, kReLU, kLeakyReLU, kHardswish };

// With kFast, for half precision results, the GPU approximates the exponential and reciprocal (2 ulp of float32).
template <bool kFast, typename A>
TORCH_FASTDET_HOST_DEVICE A logistic(A z) {
#ifdef __CUDA_ARCH__
  if constexpr (kFast) {
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(z * -1.44269504088896341f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.f + power));
    return result;
  }
  return A(1) / (A(1) + exp(-z));
#else
  return A(1) / (A(1) + std::exp(-z));
#endif
}

// Return act(z). `slope` is LeakyReLU's.
template <Activation kAct, bool kFast, typename A>
TORCH_FASTDET_HOST_DEVICE A activate(A z, A slope) {
  if constexpr (kAct == Activation::kSiLU) return z * logistic<kFast>(z);
  // Propagate NaN, as PyTorch does.
  if constexpr (kAct == Activation::kReLU) return z < A(0) ? A(0) : z;
  if constexpr (kAct == Activation::kLeakyReLU) return z > A(0) ? z : z * slope;
  if constexpr (kAct == Activation::kHardswish) {
    const A gate = z + A(3);
    return z * (gate < A(0) ? A(0) : gate > A(6) ? A(6) : gate) / A(6);
  }
  return z;
}

// Return grad * act'(z). It is 0 where act'(z) is 0 by definition, even for an infinite gradient, as in PyTorch.
template <Activation kAct, bool kFast, typename A>
TORCH_FASTDET_HOST_DEVICE A activate_backward(A z, A grad, A slope) {
  if constexpr (kAct == Activation::kSiLU) {
    const A s = logistic<kFast>(z);
    return grad * (s * (A(1) + z * (A(1) - s)));
  }
  if constexpr (kAct == Activation::kReLU) return z <= A(0) ? A(0) : grad;
  if constexpr (kAct == Activation::kLeakyReLU) return z > A(0) ? grad : grad * slope;
  if constexpr (kAct == Activation::kHardswish) return z < A(-3) ? A(0) : z < A(3) ? grad * (z / A(3) + A(0.5)) : grad;
  return grad;
}

template <typename F>
TORCH_FASTDET_HOST_DEVICE void dispatch_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kSiLU:
      return f(std::integral_constant<Activation, Activation::kSiLU>{});
    case Activation::kReLU:
      return f(std::integral_constant<Activation, Activation::kReLU>{});
    case Activation::kLeakyReLU:
      return f(std::integral_constant<Activation, Activation::kLeakyReLU>{});
    case Activation::kHardswish:
      return f(std::integral_constant<Activation, Activation::kHardswish>{});
    case Activation::kIdentity:
      break;
  }
  f(std::integral_constant<Activation, Activation::kIdentity>{});
}

}  // namespace torch_fastdet::core
