// Helpers of autograd.cpp call operators below the Autograd key, and register operators with at most a first gradient.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/common/checks.h"
#include "ops/common/options.h"

namespace torch_fastdet {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Call torch_fastdet::name, which kFunction (&f<Meta>) defines.
template <auto kFunction, typename... Arguments>
auto call_operator(const char* name, Arguments&&... arguments) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(("torch_fastdet::" + std::string(name)).c_str(), "")
                             .typed<unpacked_signature<kFunction>>();
  return op.call(std::forward<Arguments>(arguments)...);
}

template <auto kFunction, typename... Arguments>
auto call_below_autograd(const char* name, Arguments&&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_operator<kFunction>(name, std::forward<Arguments>(arguments)...);
}

// Call a backward operator, below autograd unless its own gradient must be refused.
template <auto kFunction, typename... Arguments>
auto call_gradient(const char* name, Arguments&&... arguments) {
  return at::GradMode::is_enabled() ? call_operator<kFunction>(name, std::forward<Arguments>(arguments)...)
                                    : call_below_autograd<kFunction>(name, std::forward<Arguments>(arguments)...);
}

inline std::string operator_name(const c10::OperatorHandle& op) {
  return op.schema().name().substr(sizeof("torch_fastdet::") - 1);
}

// Call f(tensor, argument) for each tensor among the arguments on the stack, lists included.
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

// Call an operator without a gradient. Detach its results, so that backward() raises, and refuse sparse tensors.
inline void detached(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  for_each_tensor(op, *stack, [&](const at::Tensor& tensor, const c10::Argument& argument) {
    if (tensor.defined() && tensor.layout() != at::kStrided) {
      check_strided(tensor, operator_name(op).c_str(), argument.name().c_str());
    }
  });
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

inline void without_gradient(torch::Library& m, std::initializer_list<const char*> operators) {
  for (const char* op : operators) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&detached>());
}

// Return the gradients that `call` returns, as tensors whose own gradient raises `refusal`.
struct NoSecondGradient : torch::autograd::Function<NoSecondGradient> {
  static variable_list forward(AutogradContext* context, at::TensorList, const std::function<variable_list()>& call,
                               const std::string& refusal) {
    context->saved_data["refusal"] = refusal;
    return call();
  }

  static variable_list backward(AutogradContext* context, const variable_list&) {
    TORCH_CHECK(false, context->saved_data["refusal"].toStringRef());
  }
};

// Call a backward operator whose results have no gradient, even under create_graph=True.
class FirstGradient : public c10::OperatorKernel {
 public:
  explicit FirstGradient(std::string refusal) : refusal_(std::move(refusal)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    if (!at::GradMode::is_enabled()) return detached(op, keys, stack);
    std::vector<at::Tensor> inputs, results;
    for_each_tensor(op, *stack, [&](const at::Tensor& tensor, const c10::Argument&) {
      if (tensor.defined()) inputs.push_back(tensor);
    });
    const size_t count = op.schema().returns().size();
    const auto call = [&] {
      detached(op, keys, stack);
      for_each_result(*stack, count, [&](const at::Tensor& tensor) { return results.emplace_back(tensor); });
      return results;
    };
    results = NoSecondGradient::apply(at::TensorList(inputs), call, refusal_);
    auto next = results.begin();
    for_each_result(*stack, count, [&](const at::Tensor&) { return *next++; });
  }

 private:
  // Replace each tensor among the results on the stack by f(tensor). Autograd does not take undefined tensors.
  template <typename F>
  static void for_each_result(torch::jit::Stack& stack, size_t count, const F& f) {
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = torch::jit::peek(stack, i, count);
      if (value.isTensorList()) {
        auto list = value.toTensorList();
        for (size_t k = 0; k < list.size(); ++k) list.set(k, f(list.get(k)));
      } else if (value.toTensor().defined()) {
        value = f(value.toTensor());
      }
    }
  }

  const std::string refusal_;
};

// Register this for the backward operator of `name`; `instead` names what has a second derivative.
inline void first_gradient_only(torch::Library& m, const char* backward, const std::string& name, const char* instead) {
  const std::string refusal = name + ": a second derivative was asked for, but it has a first derivative only; use " +
                              instead + " where a gradient of a gradient is needed";
  m.impl(backward, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<FirstGradient>(refusal)));
}

// Return a list of tensors as the tuple that an operator returns.
template <typename Result, size_t... kIndex>
Result as_tuple(const variable_list& list, std::index_sequence<kIndex...>) {
  return {list[kIndex]...};
}
template <typename Result>
Result as_tuple(const variable_list& list) {
  return as_tuple<Result>(list, std::make_index_sequence<std::tuple_size_v<Result>>());
}

// Register unpack<&Applied<Function, Result>::call> for an operator that only applies `Function`.
template <class Function, typename Result, typename Forward = decltype(&Function::forward)>
struct Applied;
template <class Function, typename Result, typename Output, typename... Parameters>
struct Applied<Function, Result, Output (*)(AutogradContext*, Parameters...)> {
  static Result call(Parameters... parameters) {
    if constexpr (std::is_same_v<Result, Output>) {
      return Function::apply(parameters...);
    } else {
      return as_tuple<Result>(Function::apply(parameters...));
    }
  }
};

}  // namespace torch_fastdet
