// Run softmax_backward except the loops, which are Backend::run(params, op) of cpu.cpp and cuda.cpp.
#pragma once

#include "core/softmax/softmax.h"
#include "ops/common/backend.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline void check_softmax_backward(const at::Tensor& grad, const at::Tensor& y) {
  constexpr const char* op = "softmax_backward";
  check_strided(grad, op, "grad_y");
  check_strided(y, op, "y");
  check_float(grad, op, "grad_y");
  check_same_device(grad, "grad_y", y, op, "y");
  const auto type = arithmetic_type(grad);
  TORCH_CHECK(y.scalar_type() == type, op, ": y has dtype ", dtype_name(y.scalar_type()), ", but ", dtype_name(type),
              " is expected beside grad_y of ", dtype_name(grad.scalar_type()));
  TORCH_CHECK(grad.dim() == 3 && y.dim() == 3, op, ": grad_y has shape ", grad.sym_sizes(), " and y ", y.sym_sizes(),
              ", but three dimensions (N, rows, columns) are expected");
  TORCH_SYM_CHECK(same_sizes(grad, y, {0, 1, 2}), op, ": grad_y has shape ", grad.sym_sizes(), ", but y has ",
                  y.sym_sizes());
  TORCH_SYM_CHECK(y.sym_size(2).sym_le(core::kMostSoftmaxColumns), op, ": y has ", y.sym_size(2),
                  " columns, but at most ", core::kMostSoftmaxColumns, " are expected");
}

template <class Backend>
at::Tensor softmax_backward(const at::Tensor& grad_y, const at::Tensor& y) {
  check_softmax_backward(grad_y, y);
  const c10::DeviceGuard guard(y.device());
  const at::Tensor out = at::empty_symint(grad_y.sym_sizes(), grad_y.options());
  if constexpr (!Backend::kMeta) {
    if (out.numel() == 0) return out;
    const at::Tensor dense = y.contiguous();
    core::SoftmaxBackwardParams params{};
    params.batch = y.size(0);
    params.rows = y.size(1);
    params.columns = y.size(2);
    params.batch_stride = grad_y.stride(0);
    params.row_stride = grad_y.stride(1);
    params.column_stride = grad_y.stride(2);
    params.grad = grad_y.const_data_ptr();
    params.y = dense.const_data_ptr();
    params.out = out.mutable_data_ptr();
    params.dtype = core_dtype(grad_y.scalar_type());
    Backend::run(params, "softmax_backward");
  }
  return out;
}

template <class Backend>
void register_softmax(torch::Library& m) {
  m.impl("softmax_backward", TORCH_FN(softmax_backward<Backend>));
}

}  // namespace torch_fastdet
