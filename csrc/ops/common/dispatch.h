// From what is known when an operator runs (a dtype, the processor's instruction set) to what is known when it is
// compiled. CPU glue; kernels use core/common/dtype.cuh.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "core/common/dtype.h"
#include "core/common/instruction_set.h"

namespace torch_fastdet {

using core::has_avx2;

// Calls f with a zero of the C++ type that `dtype` names: with_dtype(dtype, [&](auto zero) { using T = decltype(zero);
// ... }).
template <typename F>
auto with_dtype(core::DType dtype, F&& f) {
  switch (dtype) {
    case core::DType::kFloat16:
      return f(c10::Half{});
    case core::DType::kBFloat16:
      return f(c10::BFloat16{});
    case core::DType::kFloat32:
      return f(float{});
    case core::DType::kFloat64:
      break;
  }
  return f(double{});
}

}  // namespace torch_fastdet
