// Check the arguments of max poolings and their backward, and allocate their results.
#pragma once

#include "core/pool/max_pool.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline void check_pools(int64_t kernel_size, int64_t pools, const char* op) {
  TORCH_CHECK_VALUE(kernel_size % 2 == 1 && kernel_size > 0 && kernel_size <= core::kMostPoolSide, op,
                    ": kernel_size is ", kernel_size, ", but an odd number of 1 to ", core::kMostPoolSide,
                    " is expected");
  TORCH_CHECK_VALUE(pools > 0, op, ": pools is ", pools, ", but 1 or more is expected");
}

inline void check_kernel_size(int64_t kernel_size, const char* op) {
  TORCH_CHECK_VALUE(kernel_size > 0 && kernel_size <= core::kMostPoolSide, op, ": kernel_size is ", kernel_size,
                    ", but a number of 1 to ", core::kMostPoolSide, " is expected");
}

inline void check_max_pool(const at::Tensor& x, int64_t kernel_size, const char* op) {
  check_images(x, op, "x");
  check_kernel_size(kernel_size, op);
  TORCH_SYM_CHECK(x.sym_size(2).sym_ge(kernel_size).sym_and(x.sym_size(3).sym_ge(kernel_size)), op, ": x has shape ",
                  x.sym_sizes(), ", but at least ", kernel_size, " rows and columns are expected");
}

// Check that indices match grad_y's channels except those of the first of `pools` + 1 parts, or all if pools is 0.
inline void check_pool_indices(const at::Tensor& grad_y, const at::Tensor& indices, int64_t pools, const char* op) {
  check_images(grad_y, op, "grad_y");
  check_strided(indices, op, "indices");
  check_four_dimensions(indices, op, "indices");
  check_same_device(grad_y, "grad_y", indices, op, "indices");
  check_dtype(indices, at::kByte, op, "indices");
  const int64_t indexed = pools > 0 ? pools : 1, parts = pools + 1;
  const auto channels = (grad_y.sym_size(1) * indexed).sym_eq(indices.sym_size(1) * parts);
  TORCH_SYM_CHECK(channels.sym_and(same_sizes(grad_y, indices, {0, 2, 3})), op, ": indices has shape ",
                  indices.sym_sizes(), " beside grad_y of shape ", grad_y.sym_sizes(), ", but ", indexed,
                  " parts of its ", parts, " are expected");
}

inline at::Tensor empty_pool(const at::Tensor& like, c10::SymInt channels, at::ScalarType dtype,
                             at::MemoryFormat format, int64_t more = 0) {
  return at::empty_symint({like.sym_size(0), std::move(channels), like.sym_size(2) + more, like.sym_size(3) + more},
                          like.options().dtype(dtype).memory_format(format));
}

}  // namespace torch_fastdet
