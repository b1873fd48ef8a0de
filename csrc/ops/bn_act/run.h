// bn_act and its backward but for the arithmetic: check, guard the device, allocate, and hand the tensors to
// Backend::forward and Backend::backward, which cpu.cpp and cuda.cpp each define. On Meta there is nothing to run.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "core/bn_act/bn_act.h"
#include "ops/bn_act/checks.h"
#include "ops/common/backend.h"
#include "ops/common/options.h"

namespace torch_fastdet {

// Tensors in a layout that the backends walk; those that are not given are undefined.
struct BnActForward {
  bool channels_last;
  at::Tensor x, residual, weight, bias, running_mean, running_var, num_batches_tracked;  // as they come
  at::Tensor y, mean, invstd;                                                            // results
  double momentum, eps;
  core::Activation activation;
  double slope;
};

struct BnActBackward {
  bool channels_last;
  at::Tensor grad_y, x, weight, bias, mean, invstd;
  at::Tensor grad_x, grad_weight, grad_bias;  // results; of no elements where there is no such parameter
  core::Activation activation;
  double slope;
};

// Null where the tensor is undefined or has no elements.
inline core::BnActVector vector_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return {nullptr, core::DType::kFloat32};
  return {tensor.data_ptr(), core_dtype(tensor.scalar_type())};
}

inline core::BnActImage image_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const ImageStrides strides = image_strides(tensor);
  return {tensor.const_data_ptr(), strides.image, strides.channel, strides.pixel};
}

inline at::Tensor walkable_or_undefined(const OptionalTensor& tensor, bool channels_last) {
  return is_given(tensor) ? walkable(*tensor, channels_last) : at::Tensor();
}

inline at::Tensor contiguous_or_undefined(const OptionalTensor& tensor) {
  return is_given(tensor) ? tensor->contiguous() : at::Tensor();
}

// Fills y, mean and invstd, which may be parts of larger tensors; y is in that layout.
template <class Backend>
void bn_act_into(const BnActResult& result, bool channels_last, const at::Tensor& x, const OptionalTensor& weight,
                 const OptionalTensor& bias, const BnActNorm& norm, core::Activation activation, double slope,
                 const OptionalTensor& residual, const char* op) {
  const auto& [y, mean, invstd] = result;
  if (x.numel() == 0) {  // stock leaves the running statistics alone, and its module counts the batch
    if (is_given(norm.num_batches_tracked)) norm.num_batches_tracked->add_(1);
    mean.zero_();
    invstd.zero_();
    return;
  }
  Backend::forward(
      {channels_last, walkable(x, channels_last), walkable_or_undefined(residual, channels_last),
       contiguous_or_undefined(weight), contiguous_or_undefined(bias), norm.running_mean.value_or(at::Tensor()),
       norm.running_var.value_or(at::Tensor()), norm.num_batches_tracked.value_or(at::Tensor()), y, mean, invstd,
       norm.momentum, norm.eps, activation, slope},
      op);
}

template <class Backend>
BnActResult bn_act(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, const BnActNorm& norm,
                   const BnActActivation& activation, const OptionalTensor& residual) {
  constexpr const char* kOp = "bn_act";
  const core::Activation parsed = parse_activation(activation.name, kOp);
  check_bn_act(x, weight, bias, norm, residual, kOp);
  const c10::DeviceGuard guard(x.device());
  BnActResult result = empty_bn_act(x);
  if constexpr (!Backend::kMeta) {
    const bool channels_last = std::get<0>(result).suggest_memory_format() == at::MemoryFormat::ChannelsLast;
    bn_act_into<Backend>(result, channels_last, x, weight, bias, norm, parsed, activation.slope, residual, kOp);
  }
  return result;
}

template <class Backend>
BnActResult bn_act_cat(at::TensorList x, const BnActParts& parts, const BnActActivation& activation,
                       const OptionalTensor& residual) {
  constexpr const char* kOp = "bn_act_cat";
  const core::Activation parsed = parse_activation(activation.name, kOp);
  check_bn_act_cat(x, parts, residual, kOp);
  const c10::DeviceGuard guard(x[0].device());
  BnActResult result = empty_bn_act_cat(x);
  if constexpr (!Backend::kMeta) {
    const auto& [y, mean, invstd] = result;
    const bool channels_last = y.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
    int64_t at = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const int64_t channels = x[i].size(1);
      const BnActPart part = parts[i];
      bn_act_into<Backend>({y.narrow(1, at, channels), mean.narrow(0, at, channels), invstd.narrow(0, at, channels)},
                           channels_last, x[i], part.weight, part.bias, part.norm(), parsed, activation.slope,
                           i == 0 ? residual : OptionalTensor(), kOp);
      at += channels;
    }
  }
  return result;
}

template <class Backend>
BnActResult bn_act_backward(const at::Tensor& grad_y, const at::Tensor& x, const OptionalTensor& weight,
                            const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& invstd,
                            const BnActActivation& activation) {
  constexpr const char* kOp = "bn_act_backward";
  const core::Activation parsed = parse_activation(activation.name, kOp);
  check_bn_act_backward(grad_y, x, weight, bias, mean, invstd, kOp);
  const c10::DeviceGuard guard(x.device());
  at::Tensor grad_x = empty_like_image(x);
  at::Tensor grad_weight = empty_parameter_grad(x, weight), grad_bias = empty_parameter_grad(x, bias);
  if constexpr (!Backend::kMeta) {
    if (x.numel() == 0) return {grad_x, grad_weight.zero_(), grad_bias.zero_()};
    const bool channels_last = grad_x.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
    Backend::backward({channels_last, walkable(grad_y, channels_last), walkable(x, channels_last),
                       contiguous_or_undefined(weight), contiguous_or_undefined(bias), mean.contiguous(),
                       invstd.contiguous(), grad_x, grad_weight, grad_bias, parsed, activation.slope},
                      kOp);
  }
  return {grad_x, grad_weight, grad_bias};
}

template <class Backend>
void register_bn_act(torch::Library& m) {
  m.impl("bn_act", unpack<&bn_act<Backend>>);
  m.impl("bn_act_cat", unpack<&bn_act_cat<Backend>>);
  m.impl("bn_act_backward", unpack<&bn_act_backward<Backend>>);
}

}  // namespace torch_fastdet
