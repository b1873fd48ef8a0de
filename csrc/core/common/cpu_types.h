// Map a DType to the CPU's type. Kernels use dtype.cuh.
#pragma once

#include "core/common/dtype.h"

namespace torch_fastdet::core {

// Call f with a zero of the type that `dtype` names: with_dtype<Halves>(dtype, [&](auto zero) { using T =
// decltype(zero); ... }). Halves::Float16 and Halves::BFloat16 are the half precision types, which C++ does not have.
template <class Halves, typename F>
auto with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(typename Halves::Float16{});
    case DType::kBFloat16:
      return f(typename Halves::BFloat16{});
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat64:
      break;
  }
  return f(double{});
}

}  // namespace torch_fastdet::core
