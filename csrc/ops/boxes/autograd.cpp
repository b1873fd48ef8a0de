// Compute the gradients of bbox_iou and iou_loss from the boxes again, as saving them would cost 64 bytes a pair.
#include "ops/common/autograd.h"
#include "ops/boxes/run.h"
#include "ops/common/autocast.h"

namespace torch_fastdet::boxes_autograd {
namespace {

// Call iou_loss, or bbox_iou if `reduction` is empty.
at::Tensor call(const at::Tensor& box1, const at::Tensor& box2, core::IouKind kind, bool xywh,
                std::string_view reduction, double eps) {
  if (!reduction.empty()) {
    return call_below_autograd<&iou_loss<Meta>>("iou_loss", box1, box2, iou_kind_name(kind), xywh, reduction, eps);
  }
  return call_below_autograd<&bbox_iou<Meta>>("bbox_iou", box1, box2, xywh, kind == core::IouKind::kGiou,
                                              kind == core::IouKind::kDiou, kind == core::IouKind::kCiou, eps);
}

struct IouFunction : torch::autograd::Function<IouFunction> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& box1, const at::Tensor& box2, core::IouKind kind,
                            bool xywh, const std::string& reduction, double eps) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({box1, box2});
    ctx->saved_data["kind"] = std::string(iou_kind_name(kind));
    ctx->saved_data["xywh"] = xywh;
    ctx->saved_data["reduction"] = reduction;
    ctx->saved_data["eps"] = eps;
    return call(box1, box2, kind, xywh, reduction, eps);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(6);  // box1, box2; the other arguments are not tensors
    if (!grads[0].defined()) return result;
    const variable_list boxes = ctx->get_saved_variables();
    const std::string kind = ctx->saved_data["kind"].toStringRef();
    const std::string reduction = ctx->saved_data["reduction"].toStringRef();
    const bool xywh = ctx->saved_data["xywh"].toBool();
    const double eps = ctx->saved_data["eps"].toDouble();
    const std::array<bool, 2> mask = {ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    auto [grad1, grad2] = reduction.empty()
                              ? call_gradient<&bbox_iou_backward<Meta>>("bbox_iou_backward", grads[0], boxes[0],
                                                                        boxes[1], kind, xywh, eps, mask)
                              : call_gradient<&iou_loss_backward<Meta>>("iou_loss_backward", grads[0], boxes[0],
                                                                        boxes[1], kind, xywh, reduction, eps, mask);
    if (mask[0]) result[0] = grad1;
    if (mask[1]) result[1] = grad2;
    return result;
  }
};

at::Tensor apply(const at::Tensor& box1, const at::Tensor& box2, core::IouKind kind, bool xywh,
                 std::string_view reduction, double eps, const char* op) {
  const auto constant = [](const at::Tensor& box) {
    return !(at::GradMode::is_enabled() && box.requires_grad()) && !box._fw_grad(/*level=*/0).defined();
  };
  // If there is nothing to record, skip the node, which costs more than the launch.
  if (constant(box1) && constant(box2)) return call(box1, box2, kind, xywh, reduction, eps);
  // Backward reads both boxes, and autograd cannot save a tensor made in inference mode.
  for (const auto& [box, name] : {std::pair{&box1, "box1"}, std::pair{&box2, "box2"}}) {
    TORCH_CHECK(!box->is_inference(), op, ": ", name,
                " was made under torch.inference_mode(), but a gradient is being recorded, which needs a tensor made "
                "outside; pass ",
                name, ".clone()");
  }
  return IouFunction::apply(box1, box2, kind, xywh, std::string(reduction), eps);
}

at::Tensor bbox_iou_autograd(const at::Tensor& box1, const at::Tensor& box2, bool xywh, bool giou, bool diou, bool ciou,
                             double eps) {
  check_strided(box1, "bbox_iou", "box1");
  check_strided(box2, "bbox_iou", "box2");
  return apply(box1, box2, kind_from_flags(giou, diou, ciou), xywh, "", eps, "bbox_iou");
}

at::Tensor iou_loss_autograd(const at::Tensor& box1, const at::Tensor& box2, std::string_view kind, bool xywh,
                             std::string_view reduction, double eps) {
  check_strided(box1, "iou_loss", "box1");
  check_strided(box2, "iou_loss", "box2");
  parse_iou_reduction(reduction, "iou_loss");
  return apply(box1, box2, parse_iou_kind(kind, "iou_loss"), xywh, reduction, eps, "iou_loss");
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("bbox_iou", TORCH_FN(bbox_iou_autograd));
  m.impl("iou_loss", TORCH_FN(iou_loss_autograd));
  first_gradient_only(m, "bbox_iou_backward", "bbox_iou", "PyTorch operations");
  first_gradient_only(m, "iou_loss_backward", "iou_loss", "PyTorch operations");
}

// CIoU and DIoU of tensors use pow and sum, which are on PyTorch's float32 list, so halves give a float32 result.
TORCH_LIBRARY_IMPL(torch_fastdet, AutocastCPU, m) {
  in_float32_under_autocast(m, {"bbox_iou", "iou_loss"});
}

TORCH_LIBRARY_IMPL(torch_fastdet, AutocastCUDA, m) {
  in_float32_under_autocast(m, {"bbox_iou", "iou_loss"});
}

}  // namespace torch_fastdet::boxes_autograd
