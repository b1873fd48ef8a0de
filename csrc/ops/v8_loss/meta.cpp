// Meta kernels of the v8 detection loss: shapes and dtypes only.
#include <torch/library.h>

#include <algorithm>

#include "ops/v8_loss/checks.h"

namespace torch_fastdet {
namespace {

// Sizes that are still symbolic cannot be compared with numbers in a message; the kernel checks them when it runs.
bool is_symbolic(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

V8LossResult v8_loss_meta(at::TensorList heads, const at::Tensor& targets, const at::Tensor& settings,
                          at::ArrayRef<double> strides, c10::SymIntArrayRef sizes,
                          const std::optional<at::Tensor>& num_targets, const std::optional<at::Tensor>& class_weights,
                          int64_t reg_max, int64_t topk, int64_t topk2) {
  const auto known = c10::asIntArrayRefSlowOpt(sizes);
  if (known && !std::any_of(heads.begin(), heads.end(), is_symbolic) && !is_symbolic(targets)) {
    check_v8_loss(heads, targets, settings, {strides, *known, reg_max, topk, topk2}, num_targets, class_weights);
  }
  return empty_v8_loss(heads, targets, topk);
}

std::vector<at::Tensor> v8_loss_backward_meta(const at::Tensor& /*grad_loss*/, at::TensorList heads,
                                              const at::Tensor& /*targets*/, const at::Tensor& /*scales*/,
                                              const at::Tensor& /*slot_anchor*/, const at::Tensor& /*slot_row*/,
                                              const at::Tensor& /*slot_score*/, at::ArrayRef<double> /*strides*/,
                                              c10::SymIntArrayRef /*sizes*/,
                                              const std::optional<at::Tensor>& /*class_weights*/, int64_t /*reg_max*/) {
  return empty_v8_gradients(heads);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  m.impl("v8_loss", &v8_loss_meta);
  m.impl("v8_loss_backward", &v8_loss_backward_meta);
}

}  // namespace torch_fastdet
