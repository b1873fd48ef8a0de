// Pieces of the families' autograd.cpp: how to call an operator below the Autograd key, and what to register for
// operators that have no gradient, or a first one only.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <functional>
#include <string>
#include <vector>

#include "ops/common/checks.h"

namespace torch_fastdet {

// torch_fastdet::name, to call through the dispatcher. Look it up once: `static const auto op = find_operator<...>`.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("torch_fastdet::" + std::string(name)).c_str(), "")
      .typed<Signature>();
}

// The operator's name as the user types it.
inline std::string operator_name(const c10::OperatorHandle& op) {
  return op.schema().name().substr(sizeof("torch_fastdet::") - 1);
}

// Calls f(tensor, argument) for each tensor among the arguments on the stack, lists included.
template <typename F>
void for_each_tensor(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const F& f) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = torch::jit::peek(stack, i, arguments.size());
    if (value.isTensor()) {
      f(value.toTensor(), arguments[i]);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) f(tensor, arguments[i]);
    }
  }
}

// For an operator without a gradient. Its results are detached, so that backward() through them says that they do not
// require grad. A sparse tensor passes here on its way to a backend that has no kernel for it: raise our error first.
inline void detached(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for_each_tensor(op, *stack, [&](const at::Tensor& tensor, const c10::Argument& argument) {
    if (tensor.defined() && tensor.layout() != at::kStrided) {
      check_strided(tensor, operator_name(op).c_str(), argument.name().c_str());
    }
  });
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

// Registers `detached` for these operators.
inline void without_gradient(torch::Library& m, std::initializer_list<const char*> operators) {
  for (const char* op : operators) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&detached>());
}

// For an operator that has a first derivative only: makes the first gradient, under create_graph=True, a tensor whose
// own gradient raises `refusal`.
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
