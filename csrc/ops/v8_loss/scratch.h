// Turn tensors into the parameters that the losses of horizontal and of oriented boxes share, and allocate scratch.
#pragma once

#include "ops/common/backend.h"
#include "ops/v8_loss/checks.h"

namespace torch_fastdet {

// Allocate a forward pass's scratch, freed after the launch, as only this stream reuses it. `terms`: sums over slots.
template <class Backend, typename Params>
at::Tensor v8_scratch(Params& params, const at::Tensor& head, int64_t terms) {
  const int64_t anchors = params.heads.bs * params.heads.anchors, slots = params.n * params.topk;
  const auto scalar = static_cast<int64_t>(c10::elementSize(arithmetic_type(head)));
  const Places<10> places({
      anchors * 4 * scalar,
      anchors * static_cast<int64_t>(sizeof(uint32_t)),
      params.n * static_cast<int64_t>(sizeof(core::V8Target)),
      (params.heads.bs + 1) * static_cast<int64_t>(sizeof(int64_t)),
      params.n * 2 * static_cast<int64_t>(sizeof(uint64_t)),
      slots * scalar,
      slots * scalar,
      slots * static_cast<int64_t>(sizeof(int32_t)),
      Backend::slot_blocks(params) * terms * scalar,
      Backend::class_blocks(params) * scalar,
  });
  at::Tensor memory = at::empty({places.size}, arithmetic_options(head).dtype(at::kByte));
  const auto at = [&](int i) { return static_cast<void*>(memory.mutable_data_ptr<uint8_t>() + places.at[i]); };
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
  return class_weights->to(arithmetic_type(head)).contiguous();
}

inline core::V8Slots v8_slots(const V8LossTensors& state) {
  return {static_cast<int64_t*>(state.slot_anchor.data_ptr()), static_cast<int64_t*>(state.slot_row.data_ptr()),
          state.slot_score.data_ptr(), state.scales.data_ptr()};
}

inline void v8_fill_backward(core::V8LossBackwardParams& params, const at::Tensor& grad_loss, const at::Tensor& rows,
                             const V8LossTensors& state, const std::optional<at::Tensor>& weights) {
  params.targets = rows.const_data_ptr<float>();
  params.n = rows.size(0);
  params.class_weights = weights ? weights->const_data_ptr() : nullptr;
  params.topk = static_cast<int32_t>(state.slot_anchor.size(1));
  params.slots = v8_slots(state);
  params.grad_loss = grad_loss.const_data_ptr();
  params.grad_stride = grad_loss.stride(0);
}

// Run a forward pass with checked arguments. fill(params, rows of the targets) sets what only this loss has.
template <class Backend, class Params, typename Fill>
V8LossResult v8_run(at::TensorList heads, const V8LossArguments<int64_t>& a, const char* op, const Fill& fill,
                    int64_t parts = 3, int64_t terms = 4) {
  const c10::DeviceGuard guard(heads[0].device());
  const auto rows = a.targets.contiguous(), settings = a.settings.contiguous();
  const auto weights = v8_class_weights(a.class_weights, heads[0]);
  auto result = empty_v8_loss(heads[0], a.targets, a.topk, parts);
  const auto& [loss, items, scales, slot_anchor, slot_row, slot_score, status] = result;
  Params params{};
  params.heads = v8_heads(heads, {}, a.levels(), a.reg_max);
  params.targets = rows.template const_data_ptr<float>();
  params.n = rows.size(0);
  params.num_targets = a.num_targets ? a.num_targets->template const_data_ptr<int64_t>() : nullptr;
  params.settings = settings.template const_data_ptr<double>();
  params.class_weights = weights ? weights->const_data_ptr() : nullptr;
  params.topk = static_cast<int32_t>(a.topk);
  params.topk2 = static_cast<int32_t>(a.topk2);
  params.slots = v8_slots({scales, slot_anchor, slot_row, slot_score});
  params.loss = loss.data_ptr();
  params.items = items.data_ptr();
  params.status = status.template mutable_data_ptr<int64_t>();
  fill(params, rows);
  const auto scratch = v8_scratch<Backend>(params, heads[0], terms);
  Backend::run(params, op);
  return result;
}

}  // namespace torch_fastdet
