// The v8 detection loss and its backward, except the arithmetic: check, allocate, fill in the parameters, and hand them
// to Backend::run(params), which cpu.cpp and cuda.cpp each define. Backend::slot_blocks and class_blocks are the rows
// of partial sums that it wants. On Meta there is nothing to run.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <type_traits>
#include <vector>

#include "ops/common/backend.h"
#include "ops/common/options.h"
#include "ops/v8_loss/checks.h"
#include "ops/v8_loss/keypoints.h"
#include "ops/v8_loss/masks.h"

namespace torch_fastdet {

// The scratch of a forward pass in one allocation, which lives until the kernels are launched: the caching allocator
// gives its memory to later work of the same stream only.
template <class Backend>
at::Tensor v8_scratch(core::V8LossParams& params, const at::Tensor& head) {
  const int64_t anchors = params.heads.bs * params.heads.anchors, slots = params.n * params.topk;
  const auto scalar = static_cast<int64_t>(c10::elementSize(v8_arithmetic_type(head)));
  const std::array<int64_t, 10> bytes = {
      anchors * 4 * scalar,
      anchors * static_cast<int64_t>(sizeof(uint32_t)),
      params.n * static_cast<int64_t>(sizeof(core::V8Target)),
      (params.heads.bs + 1) * static_cast<int64_t>(sizeof(int64_t)),
      params.n * 2 * static_cast<int64_t>(sizeof(uint64_t)),
      slots * scalar,
      slots * scalar,
      slots * static_cast<int64_t>(sizeof(int32_t)),
      Backend::slot_blocks(params) * 4 * scalar,
      Backend::class_blocks(params) * scalar,
  };
  std::array<int64_t, bytes.size()> places{};
  int64_t size = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    places[i] = size;
    size += (bytes[i] + 255) / 256 * 256;
  }
  at::Tensor memory = at::empty({size}, v8_scalar_options(head).dtype(at::kByte));
  const auto at = [&](int i) { return static_cast<void*>(memory.mutable_data_ptr<uint8_t>() + places[i]); };
  params.scratch = {at(0),
                    static_cast<uint32_t*>(at(1)),
                    static_cast<core::V8Target*>(at(2)),
                    static_cast<int64_t*>(at(3)),
                    static_cast<uint64_t*>(at(4)),
                    at(5),
                    at(6),
                    static_cast<int32_t*>(at(7)),
                    at(8),
                    at(9)};
  return memory;
}

inline std::optional<at::Tensor> v8_class_weights(const std::optional<at::Tensor>& class_weights,
                                                  const at::Tensor& head) {
  if (!class_weights) return std::nullopt;
  return class_weights->to(v8_arithmetic_type(head)).contiguous();
}

inline core::V8Slots v8_slots(const V8LossTensors& state) {
  return {static_cast<int64_t*>(state.slot_anchor.data_ptr()), static_cast<int64_t*>(state.slot_row.data_ptr()),
          state.slot_score.data_ptr(), state.scales.data_ptr()};
}

template <class Backend>
V8LossResult v8_loss(at::TensorList heads, const at::Tensor& targets, const at::Tensor& settings,
                     const V8LevelsOn<Backend>& levels, const std::optional<at::Tensor>& num_targets,
                     const std::optional<at::Tensor>& class_weights, const V8LossOptions& options) {
  if constexpr (Backend::kMeta) {
    // Sizes that are still symbolic cannot be compared with numbers in a message; the kernel checks them when it runs.
    const auto sizes = c10::asIntArrayRefSlowOpt(levels.sizes);
    if (sizes && has_plain_sizes({targets}, heads)) {
      check_v8_loss(heads, targets, settings, {levels.strides, *sizes}, num_targets, class_weights, options);
    }
    return empty_v8_loss(heads, targets, options.topk);
  } else {
    check_v8_loss(heads, targets, settings, levels, num_targets, class_weights, options);
    const c10::DeviceGuard guard(heads[0].device());
    const auto rows = targets.contiguous(), values = settings.contiguous();
    const auto weights = v8_class_weights(class_weights, heads[0]);
    auto result = empty_v8_loss(heads, targets, options.topk);
    const auto& [loss, items, scales, slot_anchor, slot_row, slot_score, status] = result;
    core::V8LossParams params{};
    params.heads = v8_heads(heads, {}, levels, options.reg_max);
    params.targets = rows.template const_data_ptr<float>();
    params.n = rows.size(0);
    params.num_targets = num_targets ? num_targets->template const_data_ptr<int64_t>() : nullptr;
    params.settings = values.template const_data_ptr<double>();
    params.class_weights = weights ? weights->const_data_ptr() : nullptr;
    params.topk = static_cast<int32_t>(options.topk);
    params.topk2 = static_cast<int32_t>(options.topk2);
    params.slots = v8_slots({scales, slot_anchor, slot_row, slot_score});
    params.loss = loss.data_ptr();
    params.items = items.data_ptr();
    params.status = status.template mutable_data_ptr<int64_t>();
    const auto scratch = v8_scratch<Backend>(params, heads[0]);
    Backend::run(params);
    return result;
  }
}

template <class Backend>
std::vector<at::Tensor> v8_loss_backward(const at::Tensor& grad_loss, at::TensorList heads, const at::Tensor& targets,
                                         const V8LossTensors& state, const V8LevelsOn<Backend>& levels,
                                         const std::optional<at::Tensor>& class_weights, int64_t reg_max) {
  if constexpr (Backend::kMeta) {
    return empty_v8_gradients(heads);
  } else {
    check_v8_loss_backward(grad_loss, heads, targets, state, levels, class_weights, reg_max);
    const c10::DeviceGuard guard(heads[0].device());
    const auto rows = targets.contiguous();
    const auto weights = v8_class_weights(class_weights, heads[0]);
    auto gradients = empty_v8_gradients(heads);
    core::V8LossBackwardParams params{};
    params.heads = v8_heads(heads, gradients, levels, reg_max);
    params.targets = rows.template const_data_ptr<float>();
    params.n = rows.size(0);
    params.class_weights = weights ? weights->const_data_ptr() : nullptr;
    params.topk = static_cast<int32_t>(state.slot_anchor.size(1));
    params.slots = v8_slots(state);
    params.grad_loss = grad_loss.const_data_ptr();
    params.grad_stride = grad_loss.stride(0);
    Backend::run(params);
    return gradients;
  }
}

template <class Backend>
void register_v8_loss(torch::Library& m) {
  m.impl("v8_loss", unpack<&v8_loss<Backend>>);
  m.impl("v8_loss_backward", unpack<&v8_loss_backward<Backend>>);
  register_v8_mask_loss<Backend>(m);
  register_v8_keypoint_loss<Backend>(m);
}

}  // namespace torch_fastdet
