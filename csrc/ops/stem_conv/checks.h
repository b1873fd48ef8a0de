// Check the arguments of stem_conv2d and its backward, and allocate their results.
#pragma once

#include "core/stem_conv/stem_conv.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline void check_beside_squares(const at::Tensor& squares, const at::Tensor& other, const char* op, const char* name) {
  check_same_device(squares, "squares", other, op, name);
  TORCH_CHECK(other.scalar_type() == squares.scalar_type(), op, ": ", name, " has dtype ",
              dtype_name(other.scalar_type()), ", but squares has ", dtype_name(squares.scalar_type()),
              "; both must have one dtype");
}

inline void check_stem_squares(const at::Tensor& squares, int64_t kernel_size, const char* op) {
  check_images(squares, op, "squares");
  const int64_t least = kernel_size == 2;
  const auto fits = all_true({squares.sym_size(1).sym_eq(core::kStemChannels), squares.sym_size(2).sym_ge(least),
                              squares.sym_size(3).sym_ge(least)});
  TORCH_SYM_CHECK(fits, op, ": squares has shape ", squares.sym_sizes(), ", but (N, ", core::kStemChannels,
                  ", H, W) is expected, H and W at least ", least);
}

// Return a size that is a plain number in every program, because the kernels are compiled for it.
inline int64_t stem_size(const at::Tensor& tensor, int64_t dim) {
  return tensor.sym_size(dim).guard_int(__FILE__, __LINE__);
}

inline void check_stem_conv2d(const at::Tensor& squares, const at::Tensor& weight) {
  constexpr const char* op = "stem_conv2d";
  check_images(weight, op, "weight");
  const int64_t outputs = stem_size(weight, 0), side = stem_size(weight, 2);
  TORCH_CHECK(core::stem_conv_has(outputs) && stem_size(weight, 1) == core::kStemChannels && (side == 2 || side == 3) &&
                  stem_size(weight, 3) == side,
              op, ": weight has shape ", weight.sym_sizes(), ", but (K, 16, 2, 2) or (K, 16, 3, 3) with K = 16, 32, ",
              "48, 64, 80 or 96 is expected");
  check_stem_squares(squares, side, op);
  check_beside_squares(squares, weight, op, "weight");
}

inline void check_stem_conv2d_backward(const at::Tensor& grad_output, const at::Tensor& squares, int64_t kernel_size) {
  constexpr const char* op = "stem_conv2d_backward";
  TORCH_CHECK_VALUE(kernel_size == 2 || kernel_size == 3, op, ": kernel_size is ", kernel_size,
                    ", but 2 or 3 is expected");
  check_stem_squares(squares, kernel_size, op);
  check_images(grad_output, op, "grad_output");
  check_beside_squares(squares, grad_output, op, "grad_output");
  const int64_t less = kernel_size == 2;
  const auto fits =
      all_true({same_sizes(grad_output, squares, {0}), grad_output.sym_size(2).sym_eq(squares.sym_size(2) - less),
                grad_output.sym_size(3).sym_eq(squares.sym_size(3) - less)});
  TORCH_SYM_CHECK(fits, op, ": grad_output has shape ", grad_output.sym_sizes(), ", but (", squares.sym_size(0),
                  ", K, ", squares.sym_size(2) - less, ", ", squares.sym_size(3) - less,
                  ") is expected beside squares of shape ", squares.sym_sizes());
  TORCH_CHECK(core::stem_conv_has(stem_size(grad_output, 1)), op, ": grad_output has shape ", grad_output.sym_sizes(),
              ", but 16, 32, 48, 64, 80 or 96 channels are expected");
}

inline at::Tensor empty_stem_conv2d(const at::Tensor& squares, const at::Tensor& weight) {
  const int64_t less = stem_size(weight, 2) == 2;
  return at::empty_symint(
      {squares.sym_size(0), weight.sym_size(0), squares.sym_size(2) - less, squares.sym_size(3) - less},
      squares.options().memory_format(at::MemoryFormat::ChannelsLast));
}

inline at::Tensor empty_stem_weight(const at::Tensor& grad_output, int64_t kernel_size) {
  return at::empty_symint({grad_output.sym_size(1), core::kStemChannels, kernel_size, kernel_size},
                          grad_output.options().memory_format(at::MemoryFormat::ChannelsLast));
}

}  // namespace torch_fastdet
