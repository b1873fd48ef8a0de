// multi_tensor records no gradient: norms are detached, and results of recorded operations cannot be written.
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "ops/common/autograd.h"

namespace torch_fastdet::multi_tensor_autograd {
namespace {

bool is_written(const c10::Argument& argument) {
  const c10::AliasInfo* alias = argument.alias_info();
  if (!alias) return false;
  const auto& contained = alias->containedTypes();
  return alias->isWrite() ||
         std::any_of(contained.begin(), contained.end(), [](const c10::AliasInfo& type) { return type.isWrite(); });
}

void unrecorded(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size() && at::GradMode::is_enabled(); ++i) {
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (!is_written(arguments[i]) || !value.isTensorList()) continue;
    const auto tensors = value.toTensorList();
    for (size_t at = 0; at < tensors.size(); ++at) {
      const at::Tensor tensor = tensors.get(at);
      // A leaf is a parameter, which optimizers write.
      TORCH_CHECK(!tensor.requires_grad() || tensor.is_leaf(), operator_name(op), ": ", arguments[i].name(), "[", at,
                  "] was made by a recorded operation, but a tensor that can be written without recording it is "
                  "expected; call it under torch.no_grad(), or with ",
                  arguments[i].name(), "[", at, "].detach()");
    }
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  for (const char* op :
       {"multi_tensor_ema_", "multi_tensor_ema_.tensor", "multi_tensor_sgd_", "multi_tensor_sgd_.tensor",
        "multi_tensor_unscale_", "multi_tensor_norm", "multi_tensor_clip_grad_norm_"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&unrecorded>());
  }
}

}  // namespace torch_fastdet::multi_tensor_autograd
