// The forward pass of the YOLOv5 loss saves the matches and their box gradients. The backward pass reads the objectness
// logits again and writes each head's gradient, already multiplied by the incoming one.
#include "ops/common/autograd.h"
#include "ops/yolov5_loss/run.h"

namespace torch_fastdet::yolov5_loss_autograd {
namespace {

using Options = Yolov5LossOptions::Types;

struct Yolov5Loss : torch::autograd::Function<Yolov5Loss> {
  // The heads come one by one before the other tensors, because autograd does not see into lists.
  static variable_list forward(AutogradContext* context, at::TensorList heads, const at::Tensor& targets,
                               const at::Tensor& anchors, const at::Tensor& balance,
                               const std::optional<at::Tensor>& num_targets, const Options& options) {
    const auto call = [&](const auto&... option) {
      return call_below_autograd<&yolov5_loss<Meta>>("yolov5_loss", heads, targets, anchors, balance, num_targets,
                                                     option...);
    };
    auto [loss, items, levels, owner, match_cell, match_values, object_gradient] = std::apply(call, options);
    variable_list saved{targets, levels, owner, match_cell, match_values, object_gradient};
    saved.insert(saved.end(), heads.begin(), heads.end());
    context->save_for_backward(std::move(saved));
    context->mark_non_differentiable({items, levels, owner, match_cell, match_values, object_gradient});
    context->set_materialize_grads(false);  // else autograd would fill a zero tensor for each of these
    const auto fields = options_from<Yolov5LossOptions>(options);
    context->saved_data["options"] = std::vector<double>{fields.cls_pw, fields.label_smoothing, fields.fl_gamma};
    return {loss, items, levels, owner, match_cell, match_values, object_gradient};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto options = context->saved_data["options"].toDoubleVector();
    const at::TensorList heads(saved.data() + 6, saved.size() - 6);
    variable_list result(heads.size());
    if (gradients[0].defined()) {
      result = call_gradient<&yolov5_loss_backward<Meta>>("yolov5_loss_backward", gradients[0].contiguous(), heads,
                                                          saved[0], saved[1], saved[2], saved[3], saved[4], saved[5],
                                                          options[0], options[1], options[2]);
    }
    result.resize(result.size() + 5);  // there are no gradients of targets, anchors, balance, num_targets and options
    return result;
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("yolov5_loss", unpack<&Applied<Yolov5Loss, Yolov5LossResult>::call>);
  first_gradient_only(m, "yolov5_loss_backward", "yolov5_loss", "YOLOv5's own ComputeLoss");
}

}  // namespace torch_fastdet::yolov5_loss_autograd
