// Register operators that run in another type under autocast. Other operators take their inputs as they are.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <initializer_list>

namespace torch_fastdet {

// Register this under AutocastCPU and AutocastCUDA: float16 and bfloat16 arguments become float32, as for operations on
// PyTorch's own float32 list. float64 stays, and other dtypes are left to the operator's checks.
inline void in_float32(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autocast_dispatch_keyset);
  const size_t count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = torch::jit::peek(*stack, i, count);
    if (!value.isTensor()) continue;
    const at::Tensor tensor = value.toTensor();
    if (!tensor.defined()) continue;
    const at::ScalarType type = tensor.scalar_type();
    if (type == at::kHalf || type == at::kBFloat16) value = tensor.to(at::kFloat);
  }
  op.callBoxed(stack);
}

inline void in_float32_under_autocast(torch::Library& m, std::initializer_list<const char*> operators) {
  for (const char* op : operators) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&in_float32>());
}

}  // namespace torch_fastdet
