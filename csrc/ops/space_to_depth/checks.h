// Check the arguments of space_to_depth and its backward, and allocate their results.
#pragma once

#include "core/space_to_depth/space_to_depth.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline void check_space_to_depth_dtype(at::ScalarType dtype, const char* op) {
  TORCH_CHECK(is_supported_float(dtype), op, ": dtype is ", dtype_name(dtype),
              ", but float16, bfloat16, float32 or float64 is expected");
}

inline void check_space_to_depth(const at::Tensor& x, int64_t channels, at::ScalarType dtype) {
  constexpr const char* op = "space_to_depth";
  check_strided(x, op, "x");
  TORCH_CHECK(x.scalar_type() == at::kByte || is_supported_float(x.scalar_type()), op, ": x has dtype ",
              dtype_name(x.scalar_type()), ", but uint8, float16, bfloat16, float32 or float64 is expected");
  check_four_dimensions(x, op, "x");
  check_space_to_depth_dtype(dtype, op);
  const auto even = (x.sym_size(2) % 2).sym_eq(0).sym_and((x.sym_size(3) % 2).sym_eq(0));
  TORCH_SYM_CHECK(even, op, ": x has shape ", x.sym_sizes(), ", but an even height and width are expected");
  TORCH_SYM_CHECK((x.sym_size(1) * 4).sym_le(channels), op, ": channels is ", channels, ", but at least ",
                  x.sym_size(1) * 4, ", four times those of x, are expected");
}

inline void check_space_to_depth_backward(const at::Tensor& grad, int64_t channels, bool border, at::ScalarType dtype) {
  constexpr const char* op = "space_to_depth_backward";
  check_images(grad, op, "grad_output");
  check_space_to_depth_dtype(dtype, op);
  TORCH_CHECK_VALUE(channels >= 0, op, ": channels is ", channels, ", but 0 or more is expected");
  const auto fits = all_true(
      {grad.sym_size(1).sym_ge(4 * channels), grad.sym_size(2).sym_ge(border), grad.sym_size(3).sym_ge(border)});
  TORCH_SYM_CHECK(fits, op, ": grad_output has shape ", grad.sym_sizes(), ", but at least (N, ", 4 * channels, ", ",
                  border, ", ", border, ") is expected");
}

inline at::Tensor empty_space_to_depth(const at::Tensor& x, int64_t channels, bool border, at::ScalarType dtype) {
  return at::empty_symint({x.sym_size(0), channels, x.sym_size(2) / 2 + border, x.sym_size(3) / 2 + border},
                          x.options().dtype(dtype).memory_format(at::MemoryFormat::ChannelsLast));
}

inline at::Tensor empty_depth_to_space(const at::Tensor& grad, int64_t channels, bool border, at::ScalarType dtype) {
  return at::empty_symint(
      {grad.sym_size(0), channels, (grad.sym_size(2) - border) * 2, (grad.sym_size(3) - border) * 2},
      grad.options().dtype(dtype).memory_format(grad.suggest_memory_format()));
}

}  // namespace torch_fastdet
