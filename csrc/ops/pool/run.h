// Run max poolings and their backward except the loops: check, allocate, set the parameters of each pooling, and pass
// them to Backend::forward(params, op) and Backend::backward(params, op), which cpu.cpp and cuda.cpp each define.
#pragma once

#include "ops/common/backend.h"
#include "ops/pool/checks.h"

namespace torch_fastdet {

inline core::PoolTensor pool_part(const at::Tensor& tensor, int64_t first) {
  core::PoolTensor part{};
  for (int64_t d = 0; d < 4; ++d) part.stride[d] = tensor.size(d) > 1 ? tensor.stride(d) : 0;
  part.stride[1] = tensor.size(1) > 1 ? tensor.stride(1) : 1;
  part.data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) +
              first * part.stride[1] * static_cast<int64_t>(tensor.element_size());
  return part;
}

inline core::MaxPoolParams max_pool_params(const at::Tensor& target, int64_t kernel_size, bool channels_last) {
  core::MaxPoolParams params{};
  params.batch = target.size(0);
  params.channels = target.size(1);
  params.height = params.source_height = target.size(2);
  params.width = params.source_width = target.size(3);
  params.before = params.after = static_cast<int>(kernel_size / 2);
  params.channels_last = channels_last;
  params.dtype = core_dtype(target.scalar_type());
  return params;
}

template <class Backend>
std::tuple<at::Tensor, at::Tensor> max_pools_cat(const at::Tensor& x, int64_t kernel_size, int64_t pools) {
  check_images(x, "max_pools_cat", "x");
  check_pools(kernel_size, pools, "max_pools_cat");
  const c10::DeviceGuard guard(x.device());
  const at::MemoryFormat format = x.suggest_memory_format();
  at::Tensor y = empty_pool(x, x.sym_size(1) * (pools + 1), x.scalar_type(), format);
  at::Tensor indices = empty_pool(x, x.sym_size(1) * pools, at::kByte, format);
  if constexpr (!Backend::kMeta) {
    if (x.numel() == 0) return {y, indices};
    const int64_t channels = x.size(1);
    core::MaxPoolParams params = max_pool_params(x, kernel_size, format == at::MemoryFormat::ChannelsLast);
    for (int64_t i = 0; i < pools; ++i) {
      params.source = i == 0 ? pool_part(x, 0) : pool_part(y, i * channels);
      params.copy = i == 0 ? pool_part(y, 0) : core::PoolTensor{};
      params.target = pool_part(y, (i + 1) * channels);
      params.indices = pool_part(indices, i * channels);
      Backend::forward(params, "max_pools_cat");
    }
  }
  return {y, indices};
}

// Pool the first channels of y repeatedly, each time the previous result, into the other channels.
template <class Backend>
void max_pools_(const at::Tensor& y, int64_t kernel_size, int64_t pools) {
  constexpr const char* op = "max_pools_";
  check_images(y, op, "y");
  check_pools(kernel_size, pools, op);
  TORCH_SYM_CHECK((y.sym_size(1) % (pools + 1)).sym_eq(0), op, ": y has ", y.sym_size(1),
                  " channels, but a multiple of ", pools + 1, " is expected");
  if constexpr (!Backend::kMeta) {
    if (y.numel() == 0) return;
    const c10::DeviceGuard guard(y.device());
    const int64_t channels = y.size(1) / (pools + 1);
    core::MaxPoolParams params = max_pool_params(y.narrow(1, 0, channels), kernel_size, is_channels_last(y));
    for (int64_t i = 0; i < pools; ++i) {
      params.source = pool_part(y, i * channels);
      params.target = pool_part(y, (i + 1) * channels);
      Backend::forward(params, op);
    }
  }
}

template <class Backend>
at::Tensor max_pools_cat_backward(const at::Tensor& grad_y, const at::Tensor& indices, int64_t kernel_size,
                                  int64_t pools) {
  constexpr const char* op = "max_pools_cat_backward";
  check_pools(kernel_size, pools, op);
  check_pool_indices(grad_y, indices, pools, op);
  const c10::DeviceGuard guard(grad_y.device());
  const at::MemoryFormat format = indices.suggest_memory_format();
  at::Tensor grad_x = empty_pool(grad_y, grad_y.sym_size(1) / (pools + 1), grad_y.scalar_type(), format);
  if constexpr (!Backend::kMeta) {
    if (grad_x.numel() == 0) return grad_x;
    const int64_t channels = grad_x.size(1);
    core::MaxPoolParams params = max_pool_params(grad_x, kernel_size, format == at::MemoryFormat::ChannelsLast);
    // Compute the gradients of the poolings' inputs, from the last pooling to the first; two tensors alternate.
    at::Tensor above = grad_y, between[2];
    for (int64_t i = pools - 1; i >= 0; --i) {
      at::Tensor& here = i == 0 ? grad_x : between[i % 2];
      if (!here.defined()) here = at::empty_like(grad_x);
      params.source = i == pools - 1 ? pool_part(grad_y, pools * channels) : pool_part(above, 0);
      params.copy = pool_part(grad_y, i * channels);
      params.indices = pool_part(indices, i * channels);
      params.target = pool_part(here, 0);
      Backend::backward(params, op);
      above = here;
    }
  }
  return grad_x;
}

// Pool whole windows once, which gives kernel_size - 1 fewer rows and columns.
template <class Backend>
std::tuple<at::Tensor, at::Tensor> max_pool(const at::Tensor& x, int64_t kernel_size) {
  constexpr const char* op = "max_pool";
  check_max_pool(x, kernel_size, op);
  const c10::DeviceGuard guard(x.device());
  const at::MemoryFormat format = x.suggest_memory_format();
  at::Tensor y = empty_pool(x, x.sym_size(1), x.scalar_type(), format, 1 - kernel_size);
  at::Tensor indices = empty_pool(x, x.sym_size(1), at::kByte, format, 1 - kernel_size);
  if constexpr (!Backend::kMeta) {
    if (y.numel() == 0) return {y, indices};
    core::MaxPoolParams params = max_pool_params(y, kernel_size, format == at::MemoryFormat::ChannelsLast);
    params.source_height = x.size(2);
    params.source_width = x.size(3);
    params.before = 0;
    params.after = static_cast<int>(kernel_size - 1);
    params.source = pool_part(x, 0);
    params.target = pool_part(y, 0);
    params.indices = pool_part(indices, 0);
    Backend::forward(params, op);
  }
  return {y, indices};
}

template <class Backend>
at::Tensor max_pool_backward(const at::Tensor& grad_y, const at::Tensor& indices, int64_t kernel_size) {
  constexpr const char* op = "max_pool_backward";
  check_pool_indices(grad_y, indices, 0, op);
  check_kernel_size(kernel_size, op);
  const c10::DeviceGuard guard(grad_y.device());
  const at::MemoryFormat format = indices.suggest_memory_format();
  at::Tensor grad_x = empty_pool(grad_y, grad_y.sym_size(1), grad_y.scalar_type(), format, kernel_size - 1);
  if constexpr (!Backend::kMeta) {
    if (grad_x.numel() == 0) return grad_x;
    core::MaxPoolParams params = max_pool_params(grad_x, kernel_size, format == at::MemoryFormat::ChannelsLast);
    params.source_height = grad_y.size(2);
    params.source_width = grad_y.size(3);
    params.before = static_cast<int>(kernel_size - 1);
    params.after = 0;
    params.source = pool_part(grad_y, 0);
    params.indices = pool_part(indices, 0);
    params.target = pool_part(grad_x, 0);
    Backend::backward(params, op);
  }
  return grad_x;
}

template <class Backend>
void register_pool(torch::Library& m) {
  m.impl("max_pool", TORCH_FN(max_pool<Backend>));
  m.impl("max_pool_backward", TORCH_FN(max_pool_backward<Backend>));
  m.impl("max_pools_cat", TORCH_FN(max_pools_cat<Backend>));
  m.impl("max_pools_", TORCH_FN(max_pools_<Backend>));
  m.impl("max_pools_cat_backward", TORCH_FN(max_pools_cat_backward<Backend>));
}

}  // namespace torch_fastdet
