// Dispatch an operator's dtype and instruction set to compile-time types on the CPU (kernels: core/common/dtype.cuh).
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "core/common/cpu_types.h"
#include "core/common/instruction_set.h"

namespace torch_fastdet {

using core::has_avx2;

struct TorchHalves {
  using Float16 = c10::Half;
  using BFloat16 = c10::BFloat16;
};

// Call core::with_dtype with Torch's half types.
template <typename F>
auto with_dtype(core::DType dtype, F&& f) {
  return core::with_dtype<TorchHalves>(dtype, f);
}

}  // namespace torch_fastdet
