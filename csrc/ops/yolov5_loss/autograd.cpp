// Autograd of the YOLOv5 loss: the forward pass keeps the matches and their box gradients, the backward pass reads the
// objectness logits again and writes each head's gradient, already multiplied by the incoming one.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops/common/autograd.h"
#include "ops/yolov5_loss/checks.h"

namespace torch_fastdet {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Forward = Yolov5LossResult(at::TensorList, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const std::optional<at::Tensor>&, double, double, double, double, double, double,
                                 double, double, double, bool);
using Backward = std::vector<at::Tensor>(const at::Tensor&, at::TensorList, const at::Tensor&, const at::Tensor&,
                                         const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                         double, double, double);

const c10::TypedOperatorHandle<Backward>& backward_operator() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("torch_fastdet::yolov5_loss_backward", "").typed<Backward>();
  return op;
}

struct Yolov5Loss : torch::autograd::Function<Yolov5Loss> {
  // The heads come one by one behind the other tensors, for autograd sees no lists.
  static variable_list forward(AutogradContext* context, at::TensorList heads, const at::Tensor& targets,
                               const at::Tensor& anchors, const at::Tensor& balance,
                               const std::optional<at::Tensor>& num_targets, double box, double obj, double cls,
                               double cls_pw, double obj_pw, double label_smoothing, double fl_gamma, double anchor_t,
                               double gr, bool sort_obj_iou) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("torch_fastdet::yolov5_loss", "").typed<Forward>();
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [loss, items, levels, owner, match_cell, match_values, object_gradient] =
        op.call(heads, targets, anchors, balance, num_targets, box, obj, cls, cls_pw, obj_pw, label_smoothing, fl_gamma,
                anchor_t, gr, sort_obj_iou);
    variable_list saved{targets, levels, owner, match_cell, match_values, object_gradient};
    saved.insert(saved.end(), heads.begin(), heads.end());
    context->save_for_backward(std::move(saved));
    context->mark_non_differentiable({items, levels, owner, match_cell, match_values, object_gradient});
    context->set_materialize_grads(false);  // else autograd would fill a zero tensor for each of these
    context->saved_data["weights"] = std::vector<double>{cls_pw, label_smoothing, fl_gamma};
    return {loss, items, levels, owner, match_cell, match_values, object_gradient};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto weights = context->saved_data["weights"].toDoubleVector();
    const at::TensorList heads(saved.data() + 6, saved.size() - 6);
    variable_list result(heads.size());
    if (gradients[0].defined()) {
      result = backward_operator().call(gradients[0].contiguous(), heads, saved[0], saved[1], saved[2], saved[3],
                                        saved[4], saved[5], weights[0], weights[1], weights[2]);
    }
    // targets, anchors, balance, num_targets and the ten options have no gradient.
    result.resize(result.size() + 14);
    return result;
  }
};

Yolov5LossResult yolov5_loss(at::TensorList heads, const at::Tensor& targets, const at::Tensor& anchors,
                             const at::Tensor& balance, const std::optional<at::Tensor>& num_targets, double box,
                             double obj, double cls, double cls_pw, double obj_pw, double label_smoothing,
                             double fl_gamma, double anchor_t, double gr, bool sort_obj_iou) {
  auto result = Yolov5Loss::apply(heads, targets, anchors, balance, num_targets, box, obj, cls, cls_pw, obj_pw,
                                  label_smoothing, fl_gamma, anchor_t, gr, sort_obj_iou);
  return {result[0], result[1], result[2], result[3], result[4], result[5], result[6]};
}

std::vector<at::Tensor> yolov5_loss_backward(const at::Tensor& grad, at::TensorList heads, const at::Tensor& targets,
                                             const at::Tensor& levels, const at::Tensor& owner,
                                             const at::Tensor& match_cell, const at::Tensor& match_values,
                                             const at::Tensor& object_gradient, double cls_pw, double label_smoothing,
                                             double fl_gamma) {
  variable_list inputs{grad};
  inputs.insert(inputs.end(), heads.begin(), heads.end());
  return without_second_gradient(
      inputs,
      [&] {
        return backward_operator().call(grad, heads, targets, levels, owner, match_cell, match_values, object_gradient,
                                        cls_pw, label_smoothing, fl_gamma);
      },
      "yolov5_loss: a second derivative was asked for, but it has a first derivative only; "
      "use YOLOv5's own ComputeLoss where a gradient of a gradient is wanted");
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("yolov5_loss", &yolov5_loss);
  m.impl("yolov5_loss_backward", &yolov5_loss_backward);
}

}  // namespace torch_fastdet
