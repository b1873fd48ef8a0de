// golden.h for LibTorch programs: saves at::Tensor as a stage, from any device.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch_fastdet/golden.h"

namespace torch_fastdet::golden {

inline DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kChar:
      return DType::kInt8;
    case at::kByte:
      return DType::kUInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kBool:
      return DType::kBool;
    default:
      throw std::runtime_error(std::string("golden: a stage cannot have dtype ") + c10::toString(type));
  }
}

// The stride that is saved is the tensor's own, on its own device.
inline void save(Writer& writer, const std::string& name, const at::Tensor& tensor) {
  const at::Tensor host = tensor.detach().cpu();
  writer.save(name, view(host.const_data_ptr(), dtype_of(host.scalar_type()), host.sizes().vec(), host.strides().vec()),
              tensor.strides().vec());
}

}  // namespace torch_fastdet::golden
