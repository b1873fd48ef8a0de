// Checks, allocates, and launches the upsample kernels on the current stream of the tensors' device.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "core/upsample/upsample.h"
#include "ops/common/launch.h"
#include "ops/upsample/checks.h"

namespace torch_fastdet {
namespace {

at::Tensor upsample_nearest2x(const at::Tensor& x) {
  check_upsample(x);
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor out = empty_upsample(x);
  const bool channels_last = walks_channels_last(x, out, x.suggest_memory_format());
  const at::Tensor dense = with_dense_rows(x, channels_last);
  core::UpsampleForwardParams params{};
  params.plan = upsample_plan(dense, out, channels_last);
  params.x = dense.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.itemsize = static_cast<int>(x.element_size());
  check_launch(core::launch_upsample_forward(params, c10::cuda::getCurrentCUDAStream()), "upsample_nearest2x");
  return out;
}

at::Tensor upsample_nearest2x_cat(const at::Tensor& x, const at::Tensor& skip) {
  check_upsample_cat(x, skip);
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor out = empty_upsample_cat(x, skip);
  const bool channels_last = walks_channels_last(x, out, upsample_cat_format(x, skip));
  const at::Tensor dense = with_dense_rows(x.to(out.scalar_type()), channels_last);
  const at::Tensor dense_skip = with_dense_rows(skip.to(out.scalar_type()), channels_last);
  core::UpsampleForwardParams params{};
  params.plan = upsample_plan(dense, out, channels_last);
  params.x = dense.const_data_ptr();
  params.out = out.mutable_data_ptr();
  params.copy = copy_plan(dense_skip, out, channels_last);
  params.skip = dense_skip.const_data_ptr();
  params.itemsize = static_cast<int>(out.element_size());
  params.skip_out = static_cast<char*>(params.out) + x.size(1) * out.stride(1) * params.itemsize;
  check_launch(core::launch_upsample_forward(params, c10::cuda::getCurrentCUDAStream()), "upsample_nearest2x_cat");
  return out;
}

at::Tensor upsample_nearest2x_backward(const at::Tensor& grad_output) {
  check_upsample_backward(grad_output);
  const c10::cuda::CUDAGuard guard(grad_output.device());
  at::Tensor grad_x = empty_upsample_backward(grad_output);
  const bool channels_last = walks_channels_last(grad_output, grad_x, grad_output.suggest_memory_format());
  const at::Tensor dense = with_dense_rows(grad_output, channels_last);
  core::UpsampleBackwardParams params{};
  params.plan = upsample_plan(grad_x, dense, channels_last);
  params.grad_out = dense.const_data_ptr();
  params.grad_x = grad_x.mutable_data_ptr();
  params.dtype = core_dtype(grad_x.scalar_type());
  check_launch(core::launch_upsample_backward(params, c10::cuda::getCurrentCUDAStream()),
               "upsample_nearest2x_backward");
  return grad_x;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  m.impl("upsample_nearest2x", upsample_nearest2x);
  m.impl("upsample_nearest2x_backward", upsample_nearest2x_backward);
  m.impl("upsample_nearest2x_cat", upsample_nearest2x_cat);
}

}  // namespace torch_fastdet
