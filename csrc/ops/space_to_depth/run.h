// Run space_to_depth and its backward except the loops: check, allocate, set the parameters, and pass them to
// Backend::forward(params, op) and Backend::backward(params, op), which cpu.cpp and cuda.cpp each define.
#pragma once

#include "ops/common/backend.h"
#include "ops/space_to_depth/checks.h"

namespace torch_fastdet {

inline core::SpaceToDepthParams space_to_depth_params(const at::Tensor& image, const at::Tensor& deep, bool border) {
  core::SpaceToDepthParams params{};
  params.batch = image.size(0);
  params.channels = image.size(1);
  params.height = image.size(2);
  params.width = image.size(3);
  params.deep_channels = deep.size(1);
  params.border = border;
  for (int64_t d = 0; d < 4; ++d) {
    params.image_stride[d] = image.stride(d);
    params.deep_stride[d] = deep.stride(d);
  }
  return params;
}

inline void set_source_and_target(core::SpaceToDepthParams& params, const at::Tensor& source,
                                  const at::Tensor& target) {
  params.source = source.const_data_ptr();
  params.target = target.mutable_data_ptr();
  params.bytes = source.scalar_type() == at::kByte;
  if (!params.bytes) params.source_dtype = core_dtype(source.scalar_type());
  params.target_dtype = core_dtype(target.scalar_type());
}

template <class Backend>
at::Tensor space_to_depth(const at::Tensor& x, int64_t channels, bool border, std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(x.scalar_type());
  check_space_to_depth(x, channels, type);
  const c10::DeviceGuard guard(x.device());
  at::Tensor out = empty_space_to_depth(x, channels, border, type);
  if constexpr (!Backend::kMeta) {
    if (out.numel() == 0) return out;
    core::SpaceToDepthParams params = space_to_depth_params(x, out, border);
    // A dimension of one element may have any stride.
    params.deep_stride[0] = params.deep_height() * params.deep_width() * channels;
    params.deep_stride[1] = 1;
    params.deep_stride[2] = params.deep_width() * channels;
    params.deep_stride[3] = channels;
    set_source_and_target(params, x, out);
    Backend::forward(params, "space_to_depth");
  }
  return out;
}

template <class Backend>
at::Tensor space_to_depth_backward(const at::Tensor& grad_output, int64_t channels, bool border,
                                   std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(grad_output.scalar_type());
  check_space_to_depth_backward(grad_output, channels, border, type);
  const c10::DeviceGuard guard(grad_output.device());
  at::Tensor grad_x = empty_depth_to_space(grad_output, channels, border, type);
  if constexpr (!Backend::kMeta) {
    if (grad_x.numel() == 0) return grad_x;
    core::SpaceToDepthParams params = space_to_depth_params(grad_x, grad_output, border);
    set_source_and_target(params, grad_output, grad_x);
    Backend::backward(params, "space_to_depth_backward");
  }
  return grad_x;
}

template <class Backend>
void register_space_to_depth(torch::Library& m) {
  m.impl("space_to_depth", TORCH_FN(space_to_depth<Backend>));
  m.impl("space_to_depth_backward", TORCH_FN(space_to_depth_backward<Backend>));
}

}  // namespace torch_fastdet
