// Run deformable attention except the loops: check, allocate, set the parameters, and pass them to Backend::run(params,
// op), which cpu.cpp and cuda.cpp each define. Meta runs nothing.
#pragma once

#include "ops/common/backend.h"
#include "ops/deformable_attention/checks.h"

namespace torch_fastdet {

// Return a dense tensor of this type, aligned to 16 bytes: the tensor itself if it is so already.
inline at::Tensor deformable_dense(const at::Tensor& tensor, at::ScalarType type) {
  return aligned(tensor.to(type).contiguous());
}

// Hold the arguments as the loops read them, locations and weights in the type of their gradients' arithmetic.
struct DeformableInputs {
  at::Tensor value, locations, weights;

  DeformableInputs(const at::Tensor& value, const at::Tensor& locations, const at::Tensor& weights)
      : value(deformable_dense(value, value.scalar_type())),
        locations(deformable_dense(locations, arithmetic_type(value))),
        weights(deformable_dense(weights, arithmetic_type(value))) {}

  core::DeformableAttentionParams params(c10::SymIntArrayRef shapes) const {
    const int64_t image = std::max<int64_t>(value.size(0), 1);
    const int64_t most = std::max(
        {value.numel() / image, locations.numel() / image, locations.size(1) * value.size(2) * value.size(3) * 2});
    TORCH_CHECK_VALUE(most <= core::kMostDeformableElements, kDeformableAttention, ": an image has ", most,
                      " elements of value, locations or output, but at most ", core::kMostDeformableElements,
                      " are expected");
    core::DeformableAttentionParams p{};
    p.batch = value.size(0);
    p.pixels = static_cast<int32_t>(value.size(1));
    p.queries = static_cast<int32_t>(locations.size(1));
    p.heads = static_cast<int32_t>(value.size(2));
    p.channels = static_cast<int32_t>(value.size(3));
    p.points = static_cast<int32_t>(locations.size(4));
    p.level_count = static_cast<int32_t>(locations.size(3));
    int64_t first = 0;
    for (int l = 0; l < p.level_count; ++l) {
      const int64_t height = shapes[2 * l].expect_int(), width = shapes[2 * l + 1].expect_int();
      // The sum of products of such sides may have overflowed to the number of pixels.
      TORCH_CHECK_VALUE(height <= (value.size(1) - first) / width, kDeformableAttention, ": shapes[", l, "] is (",
                        height, ", ", width, "), but value has only ", value.size(1), " pixels");
      p.levels[l] = {static_cast<int32_t>(height), static_cast<int32_t>(width), static_cast<int32_t>(first)};
      first += height * width;
    }
    p.dtype = core_dtype(value.scalar_type());
    p.value = value.const_data_ptr();
    p.locations = locations.const_data_ptr();
    p.weights = weights.const_data_ptr();
    return p;
  }
};

template <class Backend>
at::Tensor deformable_attention(const at::Tensor& value, c10::SymIntArrayRef shapes, const at::Tensor& locations,
                                const at::Tensor& weights) {
  check_deformable_attention(value, shapes, locations, weights);
  const c10::DeviceGuard guard(value.device());
  at::Tensor out = at::empty_symint({value.sym_size(0), locations.sym_size(1), value.sym_size(2) * value.sym_size(3)},
                                    value.options());
  if constexpr (!Backend::kMeta) {
    const DeformableInputs inputs(value, locations, weights);
    core::DeformableAttentionParams params = inputs.params(shapes);
    params.out = out.mutable_data_ptr();
    if (out.numel() > 0) Backend::run(params, kDeformableAttention);
  }
  return out;
}

template <class Backend>
std::tuple<at::Tensor, at::Tensor, at::Tensor> deformable_attention_backward(const at::Tensor& grad_output,
                                                                             const at::Tensor& value,
                                                                             c10::SymIntArrayRef shapes,
                                                                             const at::Tensor& locations,
                                                                             const at::Tensor& weights) {
  check_deformable_attention(value, shapes, locations, weights);
  check_deformable_gradient(grad_output, value, locations);
  const c10::DeviceGuard guard(value.device());
  const auto empty = [](const at::Tensor& like, at::ScalarType type) {
    return at::empty_symint(like.sym_sizes(), like.options().dtype(type));
  };
  at::Tensor grad_value = empty(value, value.scalar_type());
  if constexpr (Backend::kMeta) {
    return {grad_value, empty(locations, locations.scalar_type()), empty(weights, weights.scalar_type())};
  } else {
    const DeformableInputs inputs(value, locations, weights);
    const at::Tensor grad = deformable_dense(grad_output, value.scalar_type());
    at::Tensor grad_locations = at::empty_like(inputs.locations), grad_weights = at::empty_like(inputs.weights);
    at::Tensor bounds =
        at::empty({Backend::kBounds ? grad.size(0) * grad.size(1) * value.size(2) : 0}, inputs.weights.options());
    core::DeformableAttentionBackwardParams params{};
    params.forward = inputs.params(shapes);
    params.grad = grad.const_data_ptr();
    params.grad_value = grad_value.mutable_data_ptr();
    params.grad_locations = grad_locations.mutable_data_ptr();
    params.grad_weights = grad_weights.mutable_data_ptr();
    params.bounds = bounds.mutable_data_ptr();
    // Without channels nothing depends on the locations.
    if (value.size(3) == 0) {
      grad_locations.zero_();
      grad_weights.zero_();
    }
    if (grad_value.numel() > 0) Backend::run(params, "deformable_attention_backward");
    return {grad_value, grad_locations.to(locations.scalar_type()), grad_weights.to(weights.scalar_type())};
  }
}

template <class Backend>
void register_deformable_attention(torch::Library& m) {
  m.impl("deformable_attention", TORCH_FN(deformable_attention<Backend>));
  m.impl("deformable_attention_backward", TORCH_FN(deformable_attention_backward<Backend>));
}

}  // namespace torch_fastdet
