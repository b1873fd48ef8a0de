// Name the floating-point types that kernels store and load, without Torch.
#pragma once

#include <cstdint>

namespace torch_fastdet::core {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

}  // namespace torch_fastdet::core
