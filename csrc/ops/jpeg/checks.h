// Check the arguments of the operators for JPEG files.
#pragma once

#include "core/jpeg/jpeg.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline void check_jpeg_bytes(const at::Tensor& tensor, const char* op, const std::string& name) {
  check_strided(tensor, op, name.c_str());
  check_dtype(tensor, at::kByte, op, name);
  TORCH_CHECK(tensor.dim() == 1, op, ": ", name, " has shape ", tensor.sym_sizes(), ", but one dimension is expected");
  TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " is not contiguous; call .contiguous() first");
}

inline void check_jpeg_table(const at::Tensor& table, int64_t columns, const char* op, const char* name) {
  check_dtype(table, at::kLong, op, name);
  TORCH_CHECK(table.dim() == 2 && table.sym_size(1) == columns, op, ": ", name, " has shape ", table.sym_sizes(),
              ", but (images, ", columns, ") is expected");
  TORCH_CHECK(table.is_contiguous(), op, ": ", name, " is not contiguous; call .contiguous() first");
}

inline void check_jpeg_decode(const at::Tensor& out, const at::Tensor& storage, const at::Tensor& plan,
                              at::IntArrayRef sizes) {
  constexpr const char* op = "jpeg_decode_";
  check_jpeg_bytes(out, op, "out");
  check_jpeg_bytes(storage, op, "storage");
  check_jpeg_table(plan, core::kJpegColumns, op, "plan");
  check_same_device(out, "out", storage, op, "storage");
  check_same_device(out, "out", plan, op, "plan");
  const bool counts = sizes.size() == 3 && sizes[0] >= 0 && sizes[1] >= 0 && sizes[2] >= 0;
  TORCH_CHECK_VALUE(counts && sizes[1] <= INT32_MAX && sizes[2] <= INT32_MAX, op, ": sizes is ", sizes,
                    ", but bytes, groups and tiles of jpeg_plan are expected");
}

}  // namespace torch_fastdet
