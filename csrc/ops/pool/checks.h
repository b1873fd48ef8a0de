// What max_pools_cat and its backward ask of their arguments, and what they allocate.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/SymBool.h>

#include <tuple>

#include "core/pool/max_pool.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline void check_pools(int64_t kernel_size, int64_t pools, const char* op) {
  TORCH_CHECK_VALUE(kernel_size % 2 == 1 && kernel_size > 0 && kernel_size <= 2 * core::kMostPoolRadius + 1, op,
                    ": kernel_size is ", kernel_size, ", but an odd number of 1 to ", 2 * core::kMostPoolRadius + 1,
                    " is expected");
  TORCH_CHECK_VALUE(pools > 0, op, ": pools is ", pools, ", but 1 or more is expected");
}

inline void check_max_pools_cat(const at::Tensor& x, int64_t kernel_size, int64_t pools) {
  constexpr const char* op = "max_pools_cat";
  check_images(x, op, "x");
  check_pools(kernel_size, pools, op);
}

inline void check_max_pools_cat_backward(const at::Tensor& grad_y, const at::Tensor& indices, int64_t kernel_size,
                                         int64_t pools) {
  constexpr const char* op = "max_pools_cat_backward";
  check_images(grad_y, op, "grad_y");
  check_strided(indices, op, "indices");
  check_four_dimensions(indices, op, "indices");
  check_pools(kernel_size, pools, op);
  check_same_device(grad_y, "grad_y", indices, op, "indices");
  TORCH_CHECK(indices.scalar_type() == at::kByte, op, ": indices has dtype ", dtype_name(indices.scalar_type()),
              ", but uint8 is expected");
  const auto fits = (grad_y.sym_size(1) * pools)
                        .sym_eq(indices.sym_size(1) * (pools + 1))
                        .sym_and(grad_y.sym_size(0).sym_eq(indices.sym_size(0)))
                        .sym_and(grad_y.sym_size(2).sym_eq(indices.sym_size(2)))
                        .sym_and(grad_y.sym_size(3).sym_eq(indices.sym_size(3)));
  TORCH_SYM_CHECK(fits, op, ": indices has shape ", indices.sym_sizes(), " beside grad_y of shape ", grad_y.sym_sizes(),
                  ", but ", pools, " parts of its ", pools + 1, " are expected");
}

inline at::Tensor empty_pool(const at::Tensor& like, c10::SymInt channels, at::ScalarType dtype,
                             at::MemoryFormat format) {
  return at::empty_symint({like.sym_size(0), std::move(channels), like.sym_size(2), like.sym_size(3)},
                          like.options().dtype(dtype).memory_format(format));
}

}  // namespace torch_fastdet
