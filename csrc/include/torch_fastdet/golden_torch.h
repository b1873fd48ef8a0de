// golden.h for LibTorch programs: saves at::Tensor as a stage, from any device.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch_fastdet/golden.h"

namespace torch_fastdet::golden {

inline std::string dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return "<f2";
    case at::kFloat:
      return "<f4";
    case at::kDouble:
      return "<f8";
    case at::kChar:
      return "|i1";
    case at::kByte:
      return "|u1";
    case at::kShort:
      return "<i2";
    case at::kInt:
      return "<i4";
    case at::kLong:
      return "<i8";
    case at::kBool:
      return "|b1";
    default:
      return c10::toString(type);  // which Writer refuses
  }
}

// bfloat16 is saved as float32.
inline void save(Writer& writer, const std::string& name, const at::Tensor& tensor) {
  const at::Tensor wide = tensor.scalar_type() == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
  const at::Tensor host = wide.detach().cpu();
  writer.save(name, {host.const_data_ptr(), dtype_of(host.scalar_type()), host.sizes().vec(), host.strides().vec()});
}

}  // namespace torch_fastdet::golden
