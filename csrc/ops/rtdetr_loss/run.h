// Run RT-DETR's loss except the arithmetic: check, allocate, set the parameters, and pass them to Backend::run(params)
// and Backend::run_backward(params), which cpu.cpp and cuda.cpp each define. Meta runs nothing.
#pragma once

#include <limits>

#include "core/linear_assignment/linear_assignment.h"
#include "ops/common/backend.h"
#include "ops/rtdetr_loss/checks.h"

namespace torch_fastdet {

using RtdetrLossResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline RtdetrLossResult empty_rtdetr_loss(const at::Tensor& boxes, const at::Tensor& scores,
                                          const std::optional<at::Tensor>& dn_boxes) {
  const auto numbers = scores.options().dtype(arithmetic_type(scores));
  const auto queries = [](const at::Tensor& of) { return of.sym_size(0) * of.sym_size(1) * of.sym_size(2); };
  const c10::SymInt sets = boxes.sym_size(0) + (dn_boxes ? dn_boxes->sym_size(0) : c10::SymInt(0));
  const c10::SymInt all = queries(boxes) + (dn_boxes ? queries(*dn_boxes) : c10::SymInt(0));
  return {at::empty({}, numbers),
          at::empty_symint({sets, 3}, numbers),
          at::empty({core::kRtdetrStatusSize}, numbers.dtype(at::kLong)),
          at::empty_symint({all}, numbers.dtype(at::kInt)),
          at::empty_symint({all}, numbers),
          at::empty_symint({sets, 4}, numbers)};
}

// Hold the dense tensors of the predictions, which live as long as the parameters.
struct RtdetrInputs {
  at::Tensor boxes, scores, targets, counts, dn_boxes, dn_scores, dn_matches;

  RtdetrInputs(const at::Tensor& boxes, const at::Tensor& scores, const at::Tensor& targets, const at::Tensor& counts,
               const std::optional<at::Tensor>& dn_boxes, const std::optional<at::Tensor>& dn_scores,
               const std::optional<at::Tensor>& dn_matches)
      : boxes(dense_boxes(boxes, scores)),
        scores(scores.contiguous()),
        targets(targets.contiguous()),
        counts(counts.contiguous()) {
    if (!dn_boxes) return;
    this->dn_boxes = dense_boxes(*dn_boxes, scores);
    this->dn_scores = dn_scores->contiguous();
    if (dn_matches) this->dn_matches = dn_matches->contiguous();
  }

  // The kernels read boxes as vectors.
  static at::Tensor dense_boxes(const at::Tensor& boxes, const at::Tensor& scores) {
    return aligned(boxes.to(arithmetic_type(scores)).contiguous());
  }

  static core::RtdetrSets sets(const at::Tensor& boxes, const at::Tensor& scores) {
    core::RtdetrSets sets{};
    if (!boxes.defined()) return sets;
    sets.sets = boxes.size(0);
    sets.queries = boxes.size(2);
    sets.boxes = boxes.const_data_ptr();
    sets.scores = scores.const_data_ptr();
    return sets;
  }

  core::RtdetrLossParams params(const RtdetrLossState& state) const {
    core::RtdetrLossParams p{};
    p.assigned = sets(boxes, scores);
    p.noisy = sets(dn_boxes, dn_scores);
    p.images = boxes.size(1);
    p.classes = scores.size(3);
    p.most = targets.size(1);
    p.dtype = core_dtype(scores.scalar_type());
    p.targets = targets.const_data_ptr<float>();
    p.counts = counts.const_data_ptr<int64_t>();
    if (dn_matches.defined()) p.matches = dn_matches.const_data_ptr<int64_t>();
    p.owner = state.owner.mutable_data_ptr<int32_t>();
    p.quality = state.quality.mutable_data_ptr();
    p.scales = state.scales.mutable_data_ptr();
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    TORCH_CHECK_VALUE(p.blocks() <= kMost && p.most <= kMost && core::kRtdetrChunk * p.classes <= kMost, kRtdetrLoss,
                      ": boxes has shape ", boxes.sizes(), ", scores ", scores.sizes(), " and targets ",
                      targets.sizes(), ", which is more than 32 bits can count");
    return p;
  }
};

template <class Backend>
RtdetrLossResult rtdetr_loss(const at::Tensor& boxes, const at::Tensor& scores, const at::Tensor& targets,
                             const at::Tensor& counts, const std::optional<at::Tensor>& dn_boxes,
                             const std::optional<at::Tensor>& dn_scores, const std::optional<at::Tensor>& dn_matches,
                             const RtdetrLossOptions& options) {
  check_rtdetr_loss(boxes, scores, targets, counts, dn_boxes, dn_scores, dn_matches);
  const c10::DeviceGuard guard(boxes.device());
  RtdetrLossResult result = empty_rtdetr_loss(boxes, scores, dn_boxes);
  if constexpr (!Backend::kMeta) {
    const auto& [loss, terms, status, owner, quality, scales] = result;
    const RtdetrInputs inputs(boxes, scores, targets, counts, dn_boxes, dn_scores, dn_matches);
    core::RtdetrLossParams params = inputs.params({owner, quality, scales});
    const double gains[3] = {options.class_gain, options.box_gain, options.giou_gain};
    const double costs[3] = {options.class_cost, options.box_cost, options.giou_cost};
    std::copy_n(gains, 3, params.gains);
    std::copy_n(costs, 3, params.costs);
    params.loss = loss.mutable_data_ptr();
    params.terms = terms.mutable_data_ptr();
    params.status = status.mutable_data_ptr<int64_t>();
    const int64_t problems = params.assigned.sets * params.images, pairs = problems * params.most;
    const int64_t number = loss.element_size();
    const Places<4> places({pairs * params.assigned.queries * number, pairs * static_cast<int64_t>(sizeof(int64_t)),
                            problems * Backend::assignment(params.assigned.queries, params.most),
                            params.blocks() * 4 * number});
    const at::Tensor scratch = at::empty({places.size}, scores.options().dtype(at::kByte));
    uint8_t* const memory = scratch.mutable_data_ptr<uint8_t>();
    params.cost = memory + places.at[0];
    params.rows = reinterpret_cast<int64_t*>(memory + places.at[1]);
    params.assignment = memory + places.at[2];
    params.partials = memory + places.at[3];
    Backend::run(params);
  }
  return result;
}

// Return gradients of boxes, scores, dn_boxes and dn_scores; those of absent sets are empty.
template <class Backend>
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> rtdetr_loss_backward(
    const at::Tensor& grad_loss, const at::Tensor& boxes, const at::Tensor& scores, const at::Tensor& targets,
    const at::Tensor& counts, const at::Tensor& owner, const at::Tensor& quality, const at::Tensor& scales,
    const std::optional<at::Tensor>& dn_boxes, const std::optional<at::Tensor>& dn_scores) {
  check_rtdetr_sets(boxes, scores, "");
  check_rtdetr_targets(boxes, targets, counts);
  TORCH_CHECK(dn_boxes.has_value() == dn_scores.has_value(),
              "rtdetr_loss_backward: dn_boxes and dn_scores are expected together, but only one of them came");
  if (dn_boxes) check_rtdetr_denoising(boxes, scores, *dn_boxes, *dn_scores);
  const at::ScalarType type = arithmetic_type(scores);
  const auto empty = [](const at::Tensor& like, at::ScalarType type) {
    return at::empty_symint(like.sym_sizes(), like.options().dtype(type));
  };
  const at::Tensor nothing = at::empty({0}, boxes.options());
  const at::Tensor grad_scores = empty(scores, scores.scalar_type());
  const at::Tensor grad_dn_scores = dn_scores ? empty(*dn_scores, dn_scores->scalar_type()) : nothing;
  if constexpr (Backend::kMeta) {
    return {empty(boxes, boxes.scalar_type()), grad_scores,
            dn_boxes ? empty(*dn_boxes, dn_boxes->scalar_type()) : nothing, grad_dn_scores};
  } else {
    const auto [loss, terms, status, of_owner, of_quality, of_scales] = empty_rtdetr_loss(boxes, scores, dn_boxes);
    TORCH_CHECK(owner.numel() == of_owner.numel() && owner.scalar_type() == at::kInt &&
                    quality.numel() == of_quality.numel() && quality.scalar_type() == type &&
                    scales.numel() == of_scales.numel() && scales.scalar_type() == type,
                "rtdetr_loss_backward: owner, quality and scales are not those of rtdetr_loss for boxes of shape ",
                boxes.sizes());
    TORCH_CHECK(grad_loss.numel() == 1, "rtdetr_loss_backward: grad_loss has shape ", grad_loss.sizes(),
                ", but one number is expected");
    for (const at::Tensor& tensor : {grad_loss, owner, quality, scales}) {
      check_same_device(boxes, "boxes", tensor, "rtdetr_loss_backward", "what rtdetr_loss left");
    }
    const c10::DeviceGuard guard(boxes.device());
    const RtdetrInputs inputs(boxes, scores, targets, counts, dn_boxes, dn_scores, std::nullopt);
    const at::Tensor grad = grad_loss.to(type);
    const at::Tensor grad_boxes = empty(boxes, type), grad_dn_boxes = dn_boxes ? empty(*dn_boxes, type) : nothing;
    core::RtdetrLossParams params = inputs.params({owner.contiguous(), quality.contiguous(), scales.contiguous()});
    params.grad_loss = grad.const_data_ptr();
    params.assigned.grad_boxes = grad_boxes.mutable_data_ptr();
    params.assigned.grad_scores = grad_scores.mutable_data_ptr();
    params.noisy.grad_boxes = grad_dn_boxes.mutable_data_ptr();
    params.noisy.grad_scores = grad_dn_scores.mutable_data_ptr();
    Backend::run_backward(params);
    return {grad_boxes.to(boxes.scalar_type()), grad_scores,
            dn_boxes ? grad_dn_boxes.to(dn_boxes->scalar_type()) : nothing, grad_dn_scores};
  }
}

template <class Backend>
void register_rtdetr_loss(torch::Library& m) {
  m.impl("rtdetr_loss", unpack<&rtdetr_loss<Backend>>);
  m.impl("rtdetr_loss_backward", TORCH_FN(rtdetr_loss_backward<Backend>));
}

}  // namespace torch_fastdet
