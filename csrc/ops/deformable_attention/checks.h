// Check the arguments of deformable_attention.
#pragma once

#include "core/deformable_attention/deformable_attention.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline constexpr const char* kDeformableAttention = "deformable_attention";

inline void check_deformable_attention(const at::Tensor& value, c10::SymIntArrayRef shapes, const at::Tensor& locations,
                                       const at::Tensor& weights) {
  constexpr const char* op = kDeformableAttention;
  check_operand(value, "value", value, op, "value");
  check_operand(value, "value", locations, op, "locations");
  check_operand(value, "value", weights, op, "weights");
  TORCH_CHECK(value.dim() == 4, op, ": value has shape ", value.sym_sizes(),
              ", but (batch, pixels, heads, channels) is expected");
  TORCH_CHECK(locations.dim() == 6, op, ": locations has shape ", locations.sym_sizes(),
              ", but (batch, queries, heads, levels, points, 2) is expected");
  TORCH_CHECK(weights.dim() == 5, op, ": weights has shape ", weights.sym_sizes(),
              ", but (batch, queries, heads, levels, points) is expected");
  const auto levels = static_cast<int64_t>(shapes.size()) / 2;
  TORCH_CHECK_VALUE(shapes.size() % 2 == 0 && levels >= 1 && levels <= core::kMostDeformableLevels, op, ": shapes has ",
                    levels, " levels, but 1 to ", core::kMostDeformableLevels, " of (height, width) are expected");
  c10::SymInt pixels = 0;
  for (int64_t l = 0; l < levels; ++l) {
    const c10::SymInt &height = shapes[2 * l], &width = shapes[2 * l + 1];
    TORCH_FASTDET_SYM_CHECK_VALUE(height.sym_ge(1).sym_and(width.sym_ge(1)), op, ": shapes[", l, "] is (", height, ", ",
                                  width, "), but a height and a width of 1 or more are expected");
    pixels = pixels + height * width;
  }
  TORCH_SYM_CHECK(value.sym_size(1).sym_eq(pixels), op, ": value has shape ", value.sym_sizes(), ", but the levels of ",
                  "shapes have ", pixels, " pixels");
  const auto fits = all_true(
      {same_sizes(locations, value, {0, 2}), locations.sym_size(3).sym_eq(levels), locations.sym_size(5).sym_eq(2)});
  TORCH_SYM_CHECK(fits, op, ": locations has shape ", locations.sym_sizes(), ", but (", value.sym_size(0), ", any, ",
                  value.sym_size(2), ", ", levels, ", any, 2) is expected beside value of shape ", value.sym_sizes());
  TORCH_SYM_CHECK(same_sizes(weights, locations, {0, 1, 2, 3, 4}), op, ": weights has shape ", weights.sym_sizes(),
                  ", but one for each point of locations of shape ", locations.sym_sizes(), " is expected");
}

inline void check_deformable_gradient(const at::Tensor& grad, const at::Tensor& value, const at::Tensor& locations) {
  constexpr const char* op = "deformable_attention_backward";
  check_operand(value, "value", grad, op, "grad_output");
  const c10::SymInt width = value.sym_size(2) * value.sym_size(3);
  TORCH_CHECK(grad.dim() == 3, op, ": grad_output has shape ", grad.sym_sizes(),
              ", but three dimensions (batch, queries, heads * channels) are expected");
  const auto fits =
      all_true({same_sizes(grad, value, {0}), same_sizes(grad, locations, {1}), grad.sym_size(2).sym_eq(width)});
  TORCH_SYM_CHECK(fits, op, ": grad_output has shape ", grad.sym_sizes(), ", but (", value.sym_size(0), ", ",
                  locations.sym_size(1), ", ", width, ") is expected");
}

}  // namespace torch_fastdet
