// Compute the gradient of RT-DETR's loss. The backward pass reads the predictions again and each query's target.
#include "ops/common/autograd.h"
#include "ops/rtdetr_loss/run.h"

namespace torch_fastdet::rtdetr_loss_autograd {
namespace {

using Optional = std::optional<at::Tensor>;

struct RtdetrLoss : torch::autograd::Function<RtdetrLoss> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& boxes, const at::Tensor& scores,
                               const at::Tensor& targets, const at::Tensor& counts, const Optional& dn_boxes,
                               const Optional& dn_scores, const Optional& dn_matches,
                               const RtdetrLossOptions::Types& options) {
    const auto call = [&](const auto&... each) {
      return call_below_autograd<&rtdetr_loss<Meta>>(kRtdetrLoss, boxes, scores, targets, counts, dn_boxes, dn_scores,
                                                     dn_matches, each...);
    };
    const auto [loss, terms, status, owner, quality, scales] = std::apply(call, options);
    ctx->save_for_backward({boxes, scores, targets, counts, owner, quality, scales, dn_boxes.value_or(at::Tensor()),
                            dn_scores.value_or(at::Tensor())});
    ctx->mark_non_differentiable({terms, status, owner, quality, scales});
    ctx->set_materialize_grads(false);
    return {loss, terms, status, owner, quality, scales};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(8);
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const auto optional = [](const at::Tensor& tensor) { return tensor.defined() ? Optional(tensor) : std::nullopt; };
    auto [boxes, scores, dn_boxes, dn_scores] = call_gradient<&rtdetr_loss_backward<Meta>>(
        "rtdetr_loss_backward", grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6],
        optional(saved[7]), optional(saved[8]));
    result[0] = boxes;
    result[1] = scores;
    if (saved[7].defined()) result[4] = dn_boxes;
    if (saved[8].defined()) result[5] = dn_scores;
    return result;
  }
};

RtdetrLossResult rtdetr_loss_autograd(const at::Tensor& boxes, const at::Tensor& scores, const at::Tensor& targets,
                                      const at::Tensor& counts, const Optional& dn_boxes, const Optional& dn_scores,
                                      const Optional& dn_matches, const RtdetrLossOptions::Types& options) {
  check_strided(boxes, kRtdetrLoss, "boxes");
  check_strided(scores, kRtdetrLoss, "scores");
  return as_tuple<RtdetrLossResult>(
      RtdetrLoss::apply(boxes, scores, targets, counts, dn_boxes, dn_scores, dn_matches, options));
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("rtdetr_loss", unpack<&rtdetr_loss_autograd>);
  first_gradient_only(m, "rtdetr_loss_backward", "rtdetr_loss", "Ultralytics' own RTDETRDetectionLoss");
}

}  // namespace torch_fastdet::rtdetr_loss_autograd
