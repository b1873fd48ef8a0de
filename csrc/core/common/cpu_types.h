// The CPU's type of a DType. Kernels use dtype.cuh.
#pragma once

#include "core/common/dtype.h"

namespace torch_fastdet::core {

// Call f with a zero of the type that `dtype` names: with_dtype<Halves>(dtype, [&](auto zero) { using T =
// decltype(zero); ... }). Halves::Float16 and Halves::BFloat16 are the types of half precision, which C++ has not.
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
