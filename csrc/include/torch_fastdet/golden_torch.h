// Extend golden.h for LibTorch programs: save an at::Tensor of any device as a stage.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch_fastdet/golden.h"

namespace torch_fastdet::golden {

// bfloat16 is saved as float32.
inline void save(Writer& writer, const std::string& name, const at::Tensor& tensor) {
  const at::Tensor wide = tensor.scalar_type() == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
  const at::Tensor host = wide.detach().cpu();
  const at::ScalarType type = host.scalar_type();
  const char kind = type == at::kBool                 ? 'b'
                    : at::isIntegralType(type, false) ? (at::isSignedType(type) ? 'i' : 'u')
                    : at::isFloatingType(type)        ? 'f'
                                                      : '?';
  const std::string dtype = detail::name_of(kind, host.element_size());
  writer.save(name, {host.const_data_ptr(), dtype, host.sizes().vec(), host.strides().vec()});
}

}  // namespace torch_fastdet::golden
