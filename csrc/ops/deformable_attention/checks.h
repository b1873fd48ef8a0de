// What deformable_attention asks of its arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/deformable_attention/deformable_attention.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline constexpr const char* kDeformableAttention = "deformable_attention";

inline void check_deformable_attention(const at::Tensor& value, c10::SymIntArrayRef shapes, const at::Tensor& locations,
                                       const at::Tensor& weights) {
  constexpr const char* op = kDeformableAttention;
  const auto check = [&](const at::Tensor& tensor, const char* name) {
    check_strided(tensor, op, name);
    check_float(tensor, op, name);
    check_same_device(value, "value", tensor, op, name);
  };
  check(value, "value");
  check(locations, "locations");
  check(weights, "weights");
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
  const auto fits = locations.sym_size(0)
                        .sym_eq(value.sym_size(0))
                        .sym_and(locations.sym_size(2).sym_eq(value.sym_size(2)))
                        .sym_and(locations.sym_size(3).sym_eq(levels))
                        .sym_and(locations.sym_size(5).sym_eq(2));
  TORCH_SYM_CHECK(fits, op, ": locations has shape ", locations.sym_sizes(), ", but (", value.sym_size(0), ", any, ",
                  value.sym_size(2), ", ", levels, ", any, 2) is expected beside value of shape ", value.sym_sizes());
  auto same = weights.sym_size(0).sym_eq(locations.sym_size(0));
  for (int64_t d = 1; d < 5; ++d) same = same.sym_and(weights.sym_size(d).sym_eq(locations.sym_size(d)));
  TORCH_SYM_CHECK(same, op, ": weights has shape ", weights.sym_sizes(),
                  ", but one for each point of locations of shape ", locations.sym_sizes(), " is expected");
}

inline void check_deformable_gradient(const at::Tensor& grad, const at::Tensor& value, const at::Tensor& locations) {
  constexpr const char* op = "deformable_attention_backward";
  check_strided(grad, op, "grad_output");
  check_float(grad, op, "grad_output");
  check_same_device(value, "value", grad, op, "grad_output");
  const c10::SymInt width = value.sym_size(2) * value.sym_size(3);
  TORCH_CHECK(grad.dim() == 3, op, ": grad_output has shape ", grad.sym_sizes(),
              ", but three dimensions (batch, queries, heads * channels) are expected");
  const auto fits = grad.sym_size(0)
                        .sym_eq(value.sym_size(0))
                        .sym_and(grad.sym_size(1).sym_eq(locations.sym_size(1)))
                        .sym_and(grad.sym_size(2).sym_eq(width));
  TORCH_SYM_CHECK(fits, op, ": grad_output has shape ", grad.sym_sizes(), ", but (", value.sym_size(0), ", ",
                  locations.sym_size(1), ", ", width, ") is expected");
}

}  // namespace torch_fastdet
