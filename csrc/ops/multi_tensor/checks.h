// Check the multi_tensor operators. Each failure names the list and the index, what was given and what is expected.
#pragma once

#include "core/multi_tensor/multi_tensor.h"
#include "ops/common/checks.h"

namespace torch_fastdet::multi_tensor {

inline std::string indexed(const char* name, int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

inline void check_length(const char* op, const char* name, size_t length, const char* first_name, size_t wanted) {
  TORCH_CHECK(length == wanted, op, ": ", name, " has ", length, " tensors, but ", first_name, " has ", wanted,
              "; both lists must be of one length");
}

// Return whether this is a Python tensor subclass without memory of its own, which operators never see.
inline bool wraps_others(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python);
}

inline void check_tensor(const at::Tensor& tensor, bool written, const char* op, const std::string& name) {
  TORCH_CHECK(!wraps_others(tensor), op, ": ", name,
              " is a tensor subclass that wraps others (DTensor, as FSDP2 makes it, a fake tensor), but a plain tensor "
              "is expected");
  check_strided(tensor, op, name.c_str());
  check_float(tensor, op, name.c_str());
  TORCH_CHECK(!tensor.is_neg(), op, ": ", name,
              " is a lazily negated view, but a tensor with its own values is expected; pass .resolve_neg()");
  if (!written || tensor.is_contiguous()) return;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    TORCH_CHECK(tensor.size(dim) <= 1 || tensor.stride(dim) != 0, op, ": ", name, " of shape ", tensor.sizes(),
                " is expanded (stride 0 in dimension ", dim,
                "), but it is written in place and each element needs memory of its own");
  }
}

inline void check_beside(const at::Tensor& tensor, const at::Tensor& first, const char* op, const std::string& name,
                         const std::string& first_name) {
  TORCH_CHECK(tensor.sym_sizes().equals(first.sym_sizes()), op, ": ", name, " has shape ", tensor.sym_sizes(), ", but ",
              first_name, " has shape ", first.sym_sizes(), "; both must be of one shape");
}

inline void check_device(const at::Tensor& tensor, at::Device device, const char* op, const std::string& name,
                         const char* first_name) {
  TORCH_CHECK(tensor.device() == device, op, ": ", name, " is on ", tensor.device(), ", but ", first_name, " is on ",
              device, "; all tensors of one call must be on one device");
}

inline void check_hyper_parameter(const char* op, const char* name, double value) {
  TORCH_CHECK_VALUE(value >= 0.0, op, ": ", name, " is ", value, ", but a number >= 0 is expected");
}

inline void check_scalar_tensor(const at::Tensor& tensor, at::Device device, const char* op, const char* name) {
  check_strided(tensor, op, name);
  check_float(tensor, op, name);
  TORCH_CHECK(tensor.sym_numel() == 1, op, ": ", name, " has shape ", tensor.sym_sizes(),
              ", but one element is expected");
  check_device(tensor, device, op, name, "the list");
}

inline void check_float32_scalar(const at::Tensor& tensor, at::Device device, const char* op, const char* name) {
  check_scalar_tensor(tensor, device, op, name);
  check_dtype(tensor, at::kFloat, op, name);
}

}  // namespace torch_fastdet::multi_tensor
