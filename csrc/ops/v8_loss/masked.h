// Run the detection loss whose assignment compares masks, except the arithmetic. Its backward is the detection loss's.
#pragma once

#include "core/v8_loss/v8_masked_loss.h"
#include "ops/v8_loss/masks.h"
#include "ops/v8_loss/scratch.h"

namespace torch_fastdet {

struct V8MaskInputs {
  const at::Tensor &coefficients, &protos, &masks;
  using Types = std::tuple<const at::Tensor&, const at::Tensor&, const at::Tensor&>;
};

inline void check_v8_mask_inputs(at::TensorList heads, const V8MaskInputs& inputs, const at::Tensor& targets,
                                 bool overlap) {
  constexpr auto op = "v8_masked_loss";
  const auto& [coefficients, protos, masks] = inputs;
  check_v8_masks(coefficients, protos, masks, overlap, op, true);
  int64_t anchors = 0;
  if (v8_is_joined(heads)) {
    anchors = heads[0].size(2);
  } else {
    for (const auto& head : heads) anchors += head.size(2) * head.size(3);
  }
  TORCH_CHECK(coefficients.size(0) == heads[0].size(0) && coefficients.size(2) == anchors &&
                  coefficients.scalar_type() == heads[0].scalar_type(),
              op, ": coefficients is ", dtype_name(coefficients.scalar_type()), " of shape ", coefficients.sizes(),
              ", but ", dtype_name(heads[0].scalar_type()), " of shape (", heads[0].size(0), ", channels, ", anchors,
              ") is expected");
  check_same_device(heads[0], "heads[0]", coefficients, op, "coefficients");
  check_v8_mask_rows(masks, targets, overlap, op);
}

template <class Backend>
V8LossResult v8_masked_loss(at::TensorList heads, const V8MaskInputs& inputs,
                            const V8LossArguments<V8Int<Backend>>& arguments, bool overlap) {
  constexpr auto op = "v8_masked_loss";
  const auto& [coefficients, protos, masks] = inputs;
  const auto& targets = arguments.targets;
  check_plain<Backend>(arguments.levels(), {targets, coefficients, protos, masks}, heads, [&](const V8Levels<>& plain) {
    check_v8_loss(heads, plain, arguments, op);
    check_v8_mask_inputs(heads, inputs, targets, overlap);
  });
  if constexpr (Backend::kMeta) {
    return empty_v8_loss(heads[0], targets, arguments.topk, 3);
  } else {
    const c10::DeviceGuard guard(heads[0].device());
    const auto readable = v8_readable_masks(masks);
    const int64_t n = targets.size(0), near = core::kV8NearFactor * arguments.topk;
    const auto scalar = arithmetic_options(heads[0]);
    const auto near_anchor = at::empty({n, near}, scalar.dtype(at::kLong)), near_overlap = at::empty({n, near}, scalar);
    const auto area = at::empty({n}, scalar.dtype(at::kFloat)), number = at::empty({n}, scalar.dtype(at::kInt));
    const auto fill = [&](core::V8MaskedLossParams& params, const at::Tensor&) {
      params.masks = v8_mask_problem(inputs.coefficients, inputs.protos, readable, overlap, 1);
      params.mask_height = readable.size(1);
      params.mask_width = readable.size(2);
      params.near = static_cast<int32_t>(near);
      params.near_anchor = near_anchor.template mutable_data_ptr<int64_t>();
      params.near_overlap = near_overlap.mutable_data_ptr();
      params.mask_area = area.template mutable_data_ptr<float>();
      params.mask_number = number.template mutable_data_ptr<int32_t>();
    };
    return v8_run<Backend, core::V8MaskedLossParams>(heads, arguments, op, fill);
  }
}

template <class Backend>
void register_v8_masked_loss(torch::Library& m) {
  m.impl("v8_masked_loss", unpack<&v8_masked_loss<Backend>>);
}

}  // namespace torch_fastdet
