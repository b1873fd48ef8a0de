// Run the upsample operators except the loops: check, allocate, set the parameters, and pass them to
// Backend::run(params, op), which cpu.cpp and cuda.cpp each define. Meta runs nothing.
#pragma once

#include "core/upsample/upsample.h"
#include "ops/common/backend.h"
#include "ops/upsample/checks.h"

namespace torch_fastdet {

// Return the parameters to read `dense` and write `out` (or its first channels).
inline core::UpsampleForwardParams upsample_params(const at::Tensor& dense, const at::Tensor& out, bool channels_last) {
  core::UpsampleForwardParams params{};
  params.plan = upsample_plan(dense, out, channels_last);
  params.x = dense.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.itemsize = static_cast<int>(out.element_size());
  return params;
}

template <class Backend>
at::Tensor upsample_nearest2x(const at::Tensor& x) {
  check_images(x, "upsample_nearest2x", "x");
  const c10::DeviceGuard guard(x.device());
  at::Tensor out = empty_upsample(x);
  if constexpr (!Backend::kMeta) {
    const bool channels_last = walks_channels_last(x, out, x.suggest_memory_format());
    const at::Tensor dense = with_dense_rows(x, channels_last);
    Backend::run(upsample_params(dense, out, channels_last), "upsample_nearest2x");
  }
  return out;
}

template <class Backend>
at::Tensor upsample_nearest2x_cat(const at::Tensor& x, const at::Tensor& skip) {
  check_upsample_cat(x, skip);
  const c10::DeviceGuard guard(x.device());
  at::Tensor out = empty_upsample_cat(x, skip);
  if constexpr (!Backend::kMeta) {
    const bool channels_last = walks_channels_last(x, out, upsample_cat_format(x, skip));
    const at::Tensor dense = with_dense_rows(x.to(out.scalar_type()), channels_last);
    const at::Tensor dense_skip = with_dense_rows(skip.to(out.scalar_type()), channels_last);
    core::UpsampleForwardParams params = upsample_params(dense, out, channels_last);
    params.copy = copy_plan(dense_skip, out, channels_last);
    params.skip = dense_skip.const_data_ptr();
    params.skip_out = static_cast<char*>(params.out) + x.size(1) * out.stride(1) * params.itemsize;
    Backend::run(params, "upsample_nearest2x_cat");
  }
  return out;
}

template <class Backend>
at::Tensor upsample_nearest2x_backward(const at::Tensor& grad_output) {
  check_upsample_backward(grad_output);
  const c10::DeviceGuard guard(grad_output.device());
  at::Tensor grad_x = empty_upsample_backward(grad_output);
  if constexpr (!Backend::kMeta) {
    const bool channels_last = walks_channels_last(grad_output, grad_x, grad_output.suggest_memory_format());
    const at::Tensor dense = with_dense_rows(grad_output, channels_last);
    core::UpsampleBackwardParams params{};
    params.plan = upsample_plan(grad_x, dense, channels_last);
    params.grad_out = dense.const_data_ptr();
    params.grad_x = grad_x.mutable_data_ptr();
    params.dtype = core_dtype(grad_x.scalar_type());
    Backend::run(params, "upsample_nearest2x_backward");
  }
  return grad_x;
}

template <class Backend>
void register_upsample(torch::Library& m) {
  m.impl("upsample_nearest2x", TORCH_FN(upsample_nearest2x<Backend>));
  m.impl("upsample_nearest2x_backward", TORCH_FN(upsample_nearest2x_backward<Backend>));
  m.impl("upsample_nearest2x_cat", TORCH_FN(upsample_nearest2x_cat<Backend>));
}

}  // namespace torch_fastdet
