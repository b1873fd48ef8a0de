// Gradients of bbox_iou and iou_loss. The backward recomputes from the boxes: they are alive anyway, and a saved
// gradient would cost 32 bytes a pair to write in the forward pass and as many to read again.
#include "ops/common/autograd.h"
#include "ops/boxes/checks.h"
#include "ops/common/autocast.h"

namespace torch_fastdet::boxes_autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using Mask = std::array<bool, 2>;

at::Tensor call_bbox_iou(const at::Tensor& box1, const at::Tensor& box2, core::IouKind kind, bool xywh, double eps) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, bool, bool, bool, bool, double);
  static const auto op = find_operator<Signature>("bbox_iou");
  return op.call(box1, box2, xywh, kind == core::IouKind::kGiou, kind == core::IouKind::kDiou,
                 kind == core::IouKind::kCiou, eps);
}

at::Tensor call_iou_loss(const at::Tensor& box1, const at::Tensor& box2, std::string_view kind, bool xywh,
                         std::string_view reduction, double eps) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, std::string_view, bool, std::string_view, double);
  static const auto op = find_operator<Signature>("iou_loss");
  return op.call(box1, box2, kind, xywh, reduction, eps);
}

TwoTensors call_bbox_iou_backward(const at::Tensor& grad, const at::Tensor& box1, const at::Tensor& box2,
                                  std::string_view kind, bool xywh, double eps, Mask mask) {
  using Signature =
      TwoTensors(const at::Tensor&, const at::Tensor&, const at::Tensor&, std::string_view, bool, double, Mask);
  static const auto op = find_operator<Signature>("bbox_iou_backward");
  return call_gradient(op, grad, box1, box2, kind, xywh, eps, mask);
}

TwoTensors call_iou_loss_backward(const at::Tensor& grad, const at::Tensor& box1, const at::Tensor& box2,
                                  std::string_view kind, bool xywh, std::string_view reduction, double eps, Mask mask) {
  using Signature = TwoTensors(const at::Tensor&, const at::Tensor&, const at::Tensor&, std::string_view, bool,
                               std::string_view, double, Mask);
  static const auto op = find_operator<Signature>("iou_loss_backward");
  return call_gradient(op, grad, box1, box2, kind, xywh, reduction, eps, mask);
}

// An empty `reduction` stands for bbox_iou itself.
struct IouFunction : torch::autograd::Function<IouFunction> {
  static constexpr bool is_traceable = true;

  static Variable forward(AutogradContext* ctx, const Variable& box1, const Variable& box2, core::IouKind kind,
                          bool xywh, const std::string& reduction, double eps) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({box1, box2});
    ctx->saved_data["kind"] = std::string(iou_kind_name(kind));
    ctx->saved_data["xywh"] = xywh;
    ctx->saved_data["reduction"] = reduction;
    ctx->saved_data["eps"] = eps;
    const at::AutoDispatchBelowADInplaceOrView below;
    return reduction.empty() ? call_bbox_iou(box1, box2, kind, xywh, eps)
                             : call_iou_loss(box1, box2, iou_kind_name(kind), xywh, reduction, eps);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(6);  // box1, box2; the other arguments are not tensors
    if (!grads[0].defined()) return result;
    const variable_list boxes = ctx->get_saved_variables();
    const std::string kind = ctx->saved_data["kind"].toStringRef();
    const std::string reduction = ctx->saved_data["reduction"].toStringRef();
    const bool xywh = ctx->saved_data["xywh"].toBool();
    const double eps = ctx->saved_data["eps"].toDouble();
    const Mask mask = {ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    auto [grad1, grad2] = reduction.empty()
                              ? call_bbox_iou_backward(grads[0], boxes[0], boxes[1], kind, xywh, eps, mask)
                              : call_iou_loss_backward(grads[0], boxes[0], boxes[1], kind, xywh, reduction, eps, mask);
    if (mask[0]) result[0] = grad1;
    if (mask[1]) result[1] = grad2;
    return result;
  }
};

// Nothing to record: skip the node, whose making costs more than the launch.
bool records_nothing(const at::Tensor& box1, const at::Tensor& box2) {
  const auto constant = [](const at::Tensor& box) {
    return !(at::GradMode::is_enabled() && box.requires_grad()) && !box._fw_grad(/*level=*/0).defined();
  };
  return constant(box1) && constant(box2);
}

// A sparse, nested or quantized tensor passes here on its way to a backend that we have no kernel for: say so in a
// sentence first.
void check_both_strided(const at::Tensor& box1, const at::Tensor& box2, const char* op) {
  check_strided(box1, op, "box1");
  check_strided(box2, op, "box2");
}

// Backward reads both boxes, which autograd saves of no tensor made in inference mode.
void check_can_be_saved(const at::Tensor& box, const char* op, const char* name) {
  TORCH_CHECK(!box.is_inference(), op, ": ", name,
              " was made under torch.inference_mode(), but a gradient is being recorded, which needs a tensor made "
              "outside; pass ",
              name, ".clone()");
}

at::Tensor bbox_iou_autograd(const at::Tensor& box1, const at::Tensor& box2, bool xywh, bool giou, bool diou, bool ciou,
                             double eps) {
  check_both_strided(box1, box2, "bbox_iou");
  const core::IouKind kind = kind_from_flags(giou, diou, ciou);
  if (records_nothing(box1, box2)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_bbox_iou(box1, box2, kind, xywh, eps);
  }
  check_can_be_saved(box1, "bbox_iou", "box1");
  check_can_be_saved(box2, "bbox_iou", "box2");
  return IouFunction::apply(box1, box2, kind, xywh, std::string(), eps);
}

at::Tensor iou_loss_autograd(const at::Tensor& box1, const at::Tensor& box2, std::string_view kind, bool xywh,
                             std::string_view reduction, double eps) {
  check_both_strided(box1, box2, "iou_loss");
  if (records_nothing(box1, box2)) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_iou_loss(box1, box2, kind, xywh, reduction, eps);
  }
  check_can_be_saved(box1, "iou_loss", "box1");
  check_can_be_saved(box2, "iou_loss", "box2");
  parse_iou_reduction(reduction, "iou_loss");
  return IouFunction::apply(box1, box2, parse_iou_kind(kind, "iou_loss"), xywh, std::string(reduction), eps);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("bbox_iou", TORCH_FN(bbox_iou_autograd));
  m.impl("iou_loss", TORCH_FN(iou_loss_autograd));
  for (const char* name : {"bbox_iou", "iou_loss"}) {
    first_gradient_only(m, (std::string(name) + "_backward").c_str(), name, "PyTorch operations");
  }
}

// The original CIoU and DIoU square and sum, and pow and sum are on PyTorch's float32 list: boxes of half precision
// give a float32 result.
TORCH_LIBRARY_IMPL(torch_fastdet, AutocastCPU, m) {
  in_float32_under_autocast(m, {"bbox_iou", "iou_loss"});
}

TORCH_LIBRARY_IMPL(torch_fastdet, AutocastCUDA, m) {
  in_float32_under_autocast(m, {"bbox_iou", "iou_loss"});
}

}  // namespace torch_fastdet::boxes_autograd
