// Run stem_conv2d and its backward except the loops: check, allocate, set the parameters, and pass them to
// Backend::forward(params, op) and Backend::backward(params, options, op), which cpu.cpp and cuda.cpp each define.
#pragma once

#include "ops/common/backend.h"
#include "ops/stem_conv/checks.h"

namespace torch_fastdet {

// Return the tensor itself if it is dense with channels innermost and aligned to 16 bytes, else a copy.
inline at::Tensor stem_dense(const at::Tensor& tensor) {
  return aligned(tensor.contiguous(at::MemoryFormat::ChannelsLast));
}

inline core::StemConvSizes stem_conv_sizes(const at::Tensor& out, int64_t kernel_size) {
  return {out.size(0), out.size(2), out.size(3), out.size(1), kernel_size};
}

template <class Backend>
at::Tensor stem_conv2d(const at::Tensor& squares, const at::Tensor& weight) {
  check_stem_conv2d(squares, weight);
  const c10::DeviceGuard guard(squares.device());
  at::Tensor out = empty_stem_conv2d(squares, weight);
  if constexpr (!Backend::kMeta) {
    if (out.numel() == 0) return out;
    const at::Tensor dense = stem_dense(squares), dense_weight = stem_dense(weight);
    core::StemConvForwardParams params{};
    params.sizes = stem_conv_sizes(out, weight.size(2));
    params.squares = dense.const_data_ptr();
    params.weight = dense_weight.const_data_ptr();
    params.out = out.mutable_data_ptr();
    params.dtype = core_dtype(out.scalar_type());
    Backend::forward(params, "stem_conv2d");
  }
  return out;
}

template <class Backend>
at::Tensor stem_conv2d_backward(const at::Tensor& grad_output, const at::Tensor& squares, int64_t kernel_size) {
  check_stem_conv2d_backward(grad_output, squares, kernel_size);
  const c10::DeviceGuard guard(squares.device());
  at::Tensor grad_weight = empty_stem_weight(grad_output, kernel_size);
  if constexpr (!Backend::kMeta) {
    if (grad_output.numel() == 0) return grad_weight.zero_();
    const at::Tensor dense = stem_dense(squares), dense_grad = stem_dense(grad_output);
    core::StemConvBackwardParams params{};
    params.sizes = stem_conv_sizes(grad_output, kernel_size);
    params.grad_out = dense_grad.const_data_ptr();
    params.squares = dense.const_data_ptr();
    params.grad_weight = grad_weight.mutable_data_ptr();
    params.dtype = core_dtype(grad_weight.scalar_type());
    Backend::backward(params, grad_weight.options(), "stem_conv2d_backward");
  }
  return grad_weight;
}

template <class Backend>
void register_stem_conv(torch::Library& m) {
  m.impl("stem_conv2d", TORCH_FN(stem_conv2d<Backend>));
  m.impl("stem_conv2d_backward", TORCH_FN(stem_conv2d_backward<Backend>));
}

}  // namespace torch_fastdet
