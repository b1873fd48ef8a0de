// golden.h for LibTorch programs: saves at::Tensor as a stage, from any device.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch_fastdet/golden.h"

namespace torch_fastdet::golden {

inline std::string dtype_of(at::ScalarType type) {
  constexpr std::pair<at::ScalarType, const char*> kNames[] = {
      {at::kHalf, "<f2"},  {at::kFloat, "<f4"}, {at::kDouble, "<f8"}, {at::kChar, "|i1"}, {at::kByte, "|u1"},
      {at::kShort, "<i2"}, {at::kInt, "<i4"},   {at::kLong, "<i8"},   {at::kBool, "|b1"}};
  for (const auto& [known, name] : kNames) {
    if (type == known) return name;
  }
  return c10::toString(type);  // which Writer refuses
}

// bfloat16 is saved as float32.
inline void save(Writer& writer, const std::string& name, const at::Tensor& tensor) {
  const at::Tensor wide = tensor.scalar_type() == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
  const at::Tensor host = wide.detach().cpu();
  writer.save(name, {host.const_data_ptr(), dtype_of(host.scalar_type()), host.sizes().vec(), host.strides().vec()});
}

}  // namespace torch_fastdet::golden
