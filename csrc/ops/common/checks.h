// Checks that more than one operator makes. Each error is one line: the argument, what came, what was expected.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <string>

#include "core/common/dtype.h"

namespace torch_fastdet {

inline bool is_supported_float(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

// A dtype as the user types it: "int64", where printing the ScalarType says "Long".
inline std::string dtype_name(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);  // a string_view since torch 2.15
}

// `op` and `name` are the operator's and the argument's names as the user types them.
inline void check_float(const at::Tensor& tensor, const char* op, const char* name) {
  TORCH_CHECK(is_supported_float(tensor.scalar_type()), op, ": ", name, " has dtype ", dtype_name(tensor.scalar_type()),
              ", but float16, bfloat16, float32 or float64 is expected");
}

inline void check_same_device(const at::Tensor& first, const char* first_name, const at::Tensor& other, const char* op,
                              const char* other_name) {
  TORCH_CHECK(first.device() == other.device(), op, ": ", other_name, " is on ", other.device(), ", but ", first_name,
              " is on ", first.device(), "; both must be on one device");
}

inline void check_on_cpu(const at::Tensor& tensor, const char* op, const std::string& name) {
  TORCH_CHECK(tensor.is_cpu(), op, ": ", name, " is on ", tensor.device(), ", but the CPU is expected");
}

inline void check_strided(const at::Tensor& tensor, const char* op, const char* name) {
  TORCH_CHECK(!tensor.is_nested(), op, ": ", name, " is a nested tensor, but a dense (strided) tensor is expected");
  TORCH_CHECK(!tensor.is_quantized(), op, ": ", name, " is a quantized tensor of ", dtype_name(tensor.scalar_type()),
              ", but float16, bfloat16, float32 or float64 is expected");
  TORCH_CHECK(tensor.layout() == at::kStrided, op, ": ", name, " has layout ", tensor.layout(),
              ", but a dense (strided) tensor is expected");
}

inline void check_four_dimensions(const at::Tensor& tensor, const char* op, const char* name) {
  TORCH_CHECK(tensor.dim() == 4, op, ": ", name, " has shape ", tensor.sym_sizes(),
              ", but four dimensions (N, C, H, W) are expected");
}

// A batch of images, or of what a layer makes of them.
inline void check_images(const at::Tensor& tensor, const char* op, const char* name) {
  check_strided(tensor, op, name);
  check_float(tensor, op, name);
  check_four_dimensions(tensor, op, name);
}

// Whether no size is symbolic. Where some are, a Meta function leaves the checks that want plain numbers to the call
// that runs.
inline bool has_plain_sizes(std::initializer_list<at::Tensor> tensors, at::TensorList list = {}) {
  const auto plain = [](const at::Tensor& tensor) {
    return !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  return std::all_of(tensors.begin(), tensors.end(), plain) && std::all_of(list.begin(), list.end(), plain);
}

// A condition on sizes that may be symbolic, as TORCH_SYM_CHECK takes it: a traced graph checks it when it runs.
#define TORCH_FASTDET_SYM_CHECK_VALUE(condition, ...) \
  TORCH_CHECK_VALUE((condition).expect_true(__FILE__, __LINE__), __VA_ARGS__)

inline core::DType core_dtype(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return core::DType::kFloat16;
    case at::kBFloat16:
      return core::DType::kBFloat16;
    case at::kFloat:
      return core::DType::kFloat32;
    case at::kDouble:
      return core::DType::kFloat64;
    default:
      TORCH_CHECK(false, "dtype ", dtype_name(type), " came, but float16, bfloat16, float32 or float64 is expected");
  }
}

}  // namespace torch_fastdet
