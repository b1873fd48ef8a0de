// Run bn_act, its backward and bias_act except the arithmetic: check, guard the device, allocate, and pass the tensors
// to Backend::forward, backward and eval, which cpu.cpp and cuda.cpp each define. Meta runs nothing.
#pragma once

#include <vector>

#include "core/bn_act/bn_act.h"
#include "ops/bn_act/checks.h"
#include "ops/common/backend.h"

namespace torch_fastdet {

// Hold tensors as the backends walk them, undefined if not given. Each part is a norm of its own channels of x.
struct BnActForward {
  struct Part {
    at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;  // as given
    at::Tensor y;                                                             // result
  };
  bool channels_last;
  at::Tensor x, residual;  // the residual belongs to the only part
  std::vector<Part> parts;
  at::Tensor mean, invstd;  // results
  double momentum, eps;
  core::Activation activation;
  double slope;
};

struct BnActBackward {
  struct Part {
    at::Tensor grad_y, weight, bias;
    at::Tensor grad_weight, grad_bias;  // results; without elements if there is no such parameter
  };
  bool channels_last;
  at::Tensor x, mean, invstd;
  std::vector<Part> parts;
  at::Tensor grad_x;  // result
  core::Activation activation;
  double slope;
};

struct BnActEval {
  bool channels_last;
  at::Tensor x, residual, weight, bias, mean, variance;
  at::Tensor y, last;  // results
  double eps;
  core::Activation activation;
  double slope;
  int64_t last_first() const { return last.defined() ? x.size(1) - last.size(1) : 0; }
};

// Return null if the tensor is undefined or has no elements.
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

inline BnActForward::Part forward_part(const OptionalTensor& weight, const OptionalTensor& bias, const BnActNorm& norm,
                                       const at::Tensor& y) {
  return {contiguous_or_undefined(weight),
          contiguous_or_undefined(bias),
          norm.running_mean.value_or(at::Tensor()),
          norm.running_var.value_or(at::Tensor()),
          norm.num_batches_tracked.value_or(at::Tensor()),
          y};
}

// Compute y, mean and invstd, which may be parts of larger tensors. y already has the layout.
template <class Backend>
void bn_act_into(const BnActResult& result, bool channels_last, const at::Tensor& x, const OptionalTensor& weight,
                 const OptionalTensor& bias, const BnActNorm& norm, core::Activation activation, double slope,
                 const OptionalTensor& residual, const char* op) {
  const auto& [y, mean, invstd] = result;
  if (x.numel() == 0) {  // PyTorch leaves the running statistics alone, but its module counts the batch
    if (is_given(norm.num_batches_tracked)) norm.num_batches_tracked->add_(1);
    mean.zero_();
    invstd.zero_();
    return;
  }
  Backend::forward({channels_last,
                    walkable(x, channels_last),
                    walkable_or_undefined(residual, channels_last),
                    {forward_part(weight, bias, norm, y)},
                    mean,
                    invstd,
                    norm.momentum,
                    norm.eps,
                    activation,
                    slope},
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
    Backend::backward({channels_last,
                       walkable(x, channels_last),
                       mean.contiguous(),
                       invstd.contiguous(),
                       {{walkable(grad_y, channels_last), contiguous_or_undefined(weight),
                         contiguous_or_undefined(bias), grad_weight, grad_bias}},
                       grad_x,
                       parsed,
                       activation.slope},
                      kOp);
  }
  return {grad_x, grad_weight, grad_bias};
}

// Apply separate norms to neighbouring channels of x and write to existing tensors.
template <class Backend>
std::tuple<at::Tensor, at::Tensor> bn_act_parts(const at::Tensor& x, at::TensorList y, const BnActParts& parts,
                                                const BnActActivation& activation, const OptionalTensor& residual) {
  constexpr const char* kOp = "bn_act_parts";
  const core::Activation parsed = parse_activation(activation.name, kOp);
  check_bn_act_parts(x, y, parts, residual, kOp);
  const c10::DeviceGuard guard(x.device());
  const auto options = x.options().dtype(arithmetic_type(x));
  const at::Tensor mean = at::empty_symint({x.sym_size(1)}, options),
                   invstd = at::empty_symint({x.sym_size(1)}, options);
  if constexpr (!Backend::kMeta) {
    const bool channels_last = x.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
    std::vector<BnActForward::Part> each;
    for (size_t i = 0; i < y.size(); ++i) {
      TORCH_CHECK(is_walkable(y[i], channels_last), kOp, ": y[", i, "] has strides ", y[i].strides(),
                  ", but the layout of x, of strides ", x.strides(), ", is expected");
      const BnActPart part = parts[i];
      each.push_back(forward_part(part.weight, part.bias, part.norm(), y[i]));
    }
    Backend::forward({channels_last, walkable(x, channels_last), walkable_or_undefined(residual, channels_last),
                      std::move(each), mean, invstd, parts.momentum, parts.eps, parsed, activation.slope},
                     kOp);
  }
  return {mean, invstd};
}

template <class Backend>
BnActResult bn_act_parts_backward(at::TensorList grad_y, const at::Tensor& x, at::TensorList weight,
                                  at::TensorList bias, const at::Tensor& mean, const at::Tensor& invstd,
                                  const BnActActivation& activation) {
  constexpr const char* kOp = "bn_act_parts_backward";
  const core::Activation parsed = parse_activation(activation.name, kOp);
  check_bn_act_parts_backward(grad_y, x, weight, bias, mean, invstd, kOp);
  const c10::DeviceGuard guard(x.device());
  const at::Tensor grad_x = empty_like_image(x);
  const at::Tensor grad_weight = at::empty_symint(mean.sym_sizes(), weight[0].options());
  const at::Tensor grad_bias = at::empty_symint(mean.sym_sizes(), bias[0].options());
  if constexpr (!Backend::kMeta) {
    const bool channels_last = grad_x.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
    std::vector<BnActBackward::Part> each;
    int64_t first = 0;
    for (size_t i = 0; i < grad_y.size(); ++i) {
      const int64_t channels = grad_y[i].size(1);
      each.push_back({walkable(grad_y[i], channels_last), weight[i].contiguous(), bias[i].contiguous(),
                      grad_weight.narrow(0, first, channels), grad_bias.narrow(0, first, channels)});
      first += channels;
    }
    Backend::backward({channels_last, walkable(x, channels_last), mean.contiguous(), invstd.contiguous(),
                       std::move(each), grad_x, parsed, activation.slope},
                      kOp);
  }
  return {grad_x, grad_weight, grad_bias};
}

// Evaluate into existing tensors: y, and a copy of the last channels of the result.
template <class Backend>
void bias_act(const at::Tensor& x, const at::Tensor& y, const OptionalTensor& weight, const OptionalTensor& bias,
              const OptionalTensor& mean, const OptionalTensor& variance, double eps, const BnActActivation& activation,
              const OptionalTensor& residual, const OptionalTensor& last) {
  constexpr const char* kOp = "bias_act";
  const core::Activation parsed = parse_activation(activation.name, kOp);
  check_bias_act(x, y, weight, bias, mean, variance, residual, last, kOp);
  if constexpr (!Backend::kMeta) {
    if (x.numel() == 0) return;
    const c10::DeviceGuard guard(x.device());
    const bool channels_last = x.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
    for (const auto& [result, name] : {std::pair{y, "y"}, std::pair{last.value_or(at::Tensor()), "last"}}) {
      TORCH_CHECK(!result.defined() || is_walkable(result, channels_last), kOp, ": ", name, " has strides ",
                  result.strides(), ", but the layout of x, of strides ", x.strides(), ", is expected");
    }
    Backend::eval({channels_last, walkable(x, channels_last), walkable_or_undefined(residual, channels_last),
                   contiguous_or_undefined(weight), contiguous_or_undefined(bias), contiguous_or_undefined(mean),
                   contiguous_or_undefined(variance), y, last.value_or(at::Tensor()), eps, parsed, activation.slope},
                  kOp);
  }
}

template <class Backend>
void register_bn_act(torch::Library& m) {
  m.impl("bn_act", unpack<&bn_act<Backend>>);
  m.impl("bn_act_cat", unpack<&bn_act_cat<Backend>>);
  m.impl("bn_act_backward", unpack<&bn_act_backward<Backend>>);
  m.impl("bn_act_parts", unpack<&bn_act_parts<Backend>>);
  m.impl("bias_act", unpack<&bias_act<Backend>>);
  m.impl("bn_act_parts_backward", unpack<&bn_act_parts_backward<Backend>>);
}

}  // namespace torch_fastdet
