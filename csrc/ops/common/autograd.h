// For operators that have a first derivative only: makes the first gradient, under create_graph=True, a tensor whose
// own gradient is refused in words.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <functional>

namespace torch_fastdet {

struct NoSecondGradient : torch::autograd::Function<NoSecondGradient> {
  using variable_list = torch::autograd::variable_list;
  using AutogradContext = torch::autograd::AutogradContext;

  static variable_list forward(AutogradContext* context, at::TensorList, const std::function<variable_list()>& call,
                               const char* refusal) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["refusal"] = std::string(refusal);
    return call();
  }

  static variable_list backward(AutogradContext* context, const variable_list&) {
    TORCH_CHECK(false, context->saved_data["refusal"].toStringRef());
  }
};

// What `call` gives, which depends on `inputs`.
inline std::vector<at::Tensor> without_second_gradient(at::TensorList inputs,
                                                       const std::function<std::vector<at::Tensor>()>& call,
                                                       const char* refusal) {
  if (!at::GradMode::is_enabled()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call();
  }
  return NoSecondGradient::apply(inputs, call, refusal);
}

}  // namespace torch_fastdet
