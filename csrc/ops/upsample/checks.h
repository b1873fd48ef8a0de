// Check the arguments of the upsample operators, and turn tensors into the plan that loops and kernels walk.
#pragma once

#include "core/upsample/upsample_plan.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline void check_upsample_cat(const at::Tensor& x, const at::Tensor& skip) {
  constexpr const char* op = "upsample_nearest2x_cat";
  check_images(x, op, "x");
  check_images(skip, op, "skip");
  check_same_device(x, "x", skip, op, "skip");
  const auto fits = all_true({same_sizes(skip, x, {0}), skip.sym_size(2).sym_eq(x.sym_size(2) * 2),
                              skip.sym_size(3).sym_eq(x.sym_size(3) * 2)});
  TORCH_SYM_CHECK(fits, op, ": skip has shape ", skip.sym_sizes(), ", but (", x.sym_size(0), ", any, ",
                  x.sym_size(2) * 2, ", ", x.sym_size(3) * 2, ") is expected beside x of shape ", x.sym_sizes());
}

inline void check_upsample_backward(const at::Tensor& grad_output) {
  constexpr const char* op = "upsample_nearest2x_backward";
  check_images(grad_output, op, "grad_output");
  const auto even = (grad_output.sym_size(2) % 2).sym_eq(0).sym_and((grad_output.sym_size(3) % 2).sym_eq(0));
  TORCH_SYM_CHECK(even, op, ": grad_output has shape ", grad_output.sym_sizes(),
                  ", but an even height and width are expected");
}

// Follow PyTorch: upsample keeps its input's format; cat is channels_last if every input is, and promotes dtypes.
inline at::MemoryFormat upsample_cat_format(const at::Tensor& x, const at::Tensor& skip) {
  const at::MemoryFormat format = x.suggest_memory_format();
  return format == skip.suggest_memory_format() ? format : at::MemoryFormat::Contiguous;
}

inline at::ScalarType upsample_cat_dtype(const at::Tensor& x, const at::Tensor& skip) {
  return c10::promoteTypes(x.scalar_type(), skip.scalar_type());
}

inline at::Tensor empty_image(const at::Tensor& like, c10::SymInt channels, c10::SymInt height, c10::SymInt width,
                              at::MemoryFormat format, at::ScalarType dtype) {
  return at::empty_symint({like.sym_size(0), std::move(channels), std::move(height), std::move(width)},
                          like.options().dtype(dtype).memory_format(format));
}

inline at::Tensor empty_upsample(const at::Tensor& x) {
  return empty_image(x, x.sym_size(1), x.sym_size(2) * 2, x.sym_size(3) * 2, x.suggest_memory_format(),
                     x.scalar_type());
}

inline at::Tensor empty_upsample_cat(const at::Tensor& x, const at::Tensor& skip) {
  return empty_image(x, x.sym_size(1) + skip.sym_size(1), skip.sym_size(2), skip.sym_size(3),
                     upsample_cat_format(x, skip), upsample_cat_dtype(x, skip));
}

inline at::Tensor empty_upsample_backward(const at::Tensor& grad_output) {
  return empty_image(grad_output, grad_output.sym_size(1), grad_output.sym_size(2) / 2, grad_output.sym_size(3) / 2,
                     grad_output.suggest_memory_format(), grad_output.scalar_type());
}

// Return whether to walk to a result as NHWC. If a single channel makes the formats coincide, NCHW has longer rows.
inline bool walks_channels_last(const at::Tensor& source, const at::Tensor& result, at::MemoryFormat format) {
  return format == at::MemoryFormat::ChannelsLast && (source.stride(3) != 1 || result.stride(3) != 1);
}

// Return the tensor, or a copy in `channels_last` (else NCHW) if the stride of the innermost dimension is not 1.
inline at::Tensor with_dense_rows(const at::Tensor& tensor, bool channels_last) {
  const int64_t inner = channels_last ? 1 : 3;
  const bool dense = tensor.stride(inner) == 1 || tensor.size(inner) <= 1;
  return dense ? tensor : tensor.contiguous(memory_format(channels_last));
}

inline core::UpsamplePlan upsample_plan(const at::Tensor& small, const at::Tensor& large, bool channels_last) {
  return core::make_upsample_plan(small.sizes().data(), small.strides().data(), large.strides().data(), channels_last);
}

inline core::CopyPlan copy_plan(const at::Tensor& source, const at::Tensor& target, bool channels_last) {
  return core::make_copy_plan(source.sizes().data(), source.strides().data(), target.strides().data(), channels_last);
}

}  // namespace torch_fastdet
