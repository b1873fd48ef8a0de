// Shapes, dtypes and memory formats of the upsample operators, without data.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "ops/upsample/checks.h"

namespace torch_fastdet {
namespace {

at::Tensor upsample_nearest2x(const at::Tensor& x) {
  check_upsample(x);
  return empty_upsample(x);
}

at::Tensor upsample_nearest2x_backward(const at::Tensor& grad_output) {
  check_upsample_backward(grad_output);
  return empty_upsample_backward(grad_output);
}

at::Tensor upsample_nearest2x_cat(const at::Tensor& x, const at::Tensor& skip) {
  check_upsample_cat(x, skip);
  return empty_upsample_cat(x, skip);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  m.impl("upsample_nearest2x", upsample_nearest2x);
  m.impl("upsample_nearest2x_backward", upsample_nearest2x_backward);
  m.impl("upsample_nearest2x_cat", upsample_nearest2x_cat);
}

}  // namespace torch_fastdet
