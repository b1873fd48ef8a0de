// These checks serve more than one operator. Each error is one line: the argument, what it is, what is expected.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymBool.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>

#include "core/common/dtype.h"

namespace torch_fastdet {

inline bool is_supported_float(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

// Return a dtype as the user types it: "int64", where printing the ScalarType gives "Long".
inline std::string dtype_name(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);  // a string_view since torch 2.15
}

// `op` and `name` are the operator's and the argument's names as the user types them.
inline void check_float(const at::Tensor& tensor, const char* op, const char* name) {
  TORCH_CHECK(is_supported_float(tensor.scalar_type()), op, ": ", name, " has dtype ", dtype_name(tensor.scalar_type()),
              ", but float16, bfloat16, float32 or float64 is expected");
}

inline void check_dtype(const at::Tensor& tensor, at::ScalarType type, const char* op, const std::string& name) {
  TORCH_CHECK(tensor.scalar_type() == type, op, ": ", name, " has dtype ", dtype_name(tensor.scalar_type()), ", but ",
              dtype_name(type), " is expected");
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

inline void check_operand(const at::Tensor& first, const char* first_name, const at::Tensor& tensor, const char* op,
                          const char* name) {
  check_strided(tensor, op, name);
  check_float(tensor, op, name);
  check_same_device(first, first_name, tensor, op, name);
}

inline void check_four_dimensions(const at::Tensor& tensor, const char* op, const char* name) {
  TORCH_CHECK(tensor.dim() == 4, op, ": ", name, " has shape ", tensor.sym_sizes(),
              ", but four dimensions (N, C, H, W) are expected");
}

// Check a batch of images, or of a layer's outputs.
inline void check_images(const at::Tensor& tensor, const char* op, const char* name) {
  check_strided(tensor, op, name);
  check_float(tensor, op, name);
  check_four_dimensions(tensor, op, name);
}

// Check the tensors of a model's head, and that they share one device and dtype.
inline void check_heads(at::TensorList heads, const char* op) {
  for (size_t i = 0; i < heads.size(); ++i) {
    check_operand(heads[0], "heads[0]", heads[i], op, "heads");
    TORCH_CHECK(heads[i].scalar_type() == heads[0].scalar_type(), op, ": heads[", i, "] is ",
                dtype_name(heads[i].scalar_type()), ", but heads[0] is ", dtype_name(heads[0].scalar_type()),
                "; all heads must have one dtype");
  }
}

inline void check_num_targets(const at::Tensor& first, const char* first_name,
                              const std::optional<at::Tensor>& num_targets, const char* op) {
  if (!num_targets) return;
  TORCH_CHECK(num_targets->scalar_type() == at::kLong && num_targets->numel() == 1, op, ": num_targets is ",
              dtype_name(num_targets->scalar_type()), " of shape ", num_targets->sizes(),
              ", but one int64 is expected");
  check_same_device(first, first_name, *num_targets, op, "num_targets");
}

// Return whether no size is symbolic. If one is, a Meta function leaves checks of plain numbers to the call that runs.
inline bool has_plain_sizes(std::initializer_list<at::Tensor> tensors, at::TensorList list = {}) {
  const auto plain = [](const at::Tensor& tensor) {
    return !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  return std::all_of(tensors.begin(), tensors.end(), plain) && std::all_of(list.begin(), list.end(), plain);
}

// Return the conjunction of conditions on sizes that may be symbolic.
inline c10::SymBool all_true(std::initializer_list<c10::SymBool> conditions) {
  c10::SymBool all = *conditions.begin();
  for (const c10::SymBool& condition : conditions) all = all.sym_and(condition);
  return all;
}

inline c10::SymBool same_sizes(const at::Tensor& a, const at::Tensor& b, std::initializer_list<int64_t> dims) {
  c10::SymBool same = a.sym_size(*dims.begin()).sym_eq(b.sym_size(*dims.begin()));
  for (const int64_t d : dims) same = same.sym_and(a.sym_size(d).sym_eq(b.sym_size(d)));
  return same;
}

// Check a condition on sizes that may be symbolic, like TORCH_SYM_CHECK: a traced graph checks it when it runs.
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

inline at::ScalarType arithmetic_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

inline at::ScalarType arithmetic_type(const at::Tensor& tensor) {
  return arithmetic_type(tensor.scalar_type());
}

inline at::TensorOptions arithmetic_options(const at::Tensor& tensor) {
  return tensor.options().memory_format(std::nullopt).requires_grad(std::nullopt).dtype(arithmetic_type(tensor));
}

inline at::MemoryFormat memory_format(bool channels_last) {
  return channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

inline bool is_channels_last(const at::Tensor& tensor) {
  return tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
}

// Return the dense tensor itself if it starts at a multiple of 16 bytes, else a copy.
inline at::Tensor aligned(const at::Tensor& dense) {
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

// Return dense float32 rows: the tensor itself if it has them.
inline at::Tensor dense_float_rows(const at::Tensor& tensor) {
  const at::Tensor rows = tensor.to(at::kFloat);
  return rows.stride(-1) == 1 || rows.size(-1) <= 1 ? rows : rows.contiguous();
}

// Return an uninitialized tensor, in the layout of `like` if that is dense, else contiguous.
inline at::Tensor empty_dense_like(const at::Tensor& like, bool dense) {
  return at::empty_like(like, {}, dense ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous);
}

}  // namespace torch_fastdet
