// bbox_iou and iou_loss on Meta: shapes and dtypes only, of sizes that may be symbolic.
#include <torch/library.h>

#include "ops/boxes/run.h"

namespace torch_fastdet {
namespace {

at::Tensor bbox_iou_meta(const at::Tensor& box1, const at::Tensor& box2, bool, bool, bool, bool, double eps) {
  check_bbox_iou(box1, box2, eps, "bbox_iou");
  return at::empty_symint(iou_sym_shape(box1, box2), box1.options().dtype(iou_dtype(box1, box2)));
}

at::Tensor iou_loss_meta(const at::Tensor& box1, const at::Tensor& box2, std::string_view kind, bool,
                         std::string_view reduction, double eps) {
  parse_iou_kind(kind, "iou_loss");
  const core::IouReduction reduce = parse_iou_reduction(reduction, "iou_loss");
  check_bbox_iou(box1, box2, eps, "iou_loss");
  const at::SymDimVector shape = reduce == core::IouReduction::kNone ? iou_sym_shape(box1, box2) : at::SymDimVector();
  return at::empty_symint(shape, box1.options().dtype(iou_dtype(box1, box2)));
}

std::tuple<at::Tensor, at::Tensor> bbox_iou_backward_meta(const at::Tensor& grad, const at::Tensor& box1,
                                                          const at::Tensor& box2, std::string_view kind, bool,
                                                          double eps, std::array<bool, 2> output_mask) {
  parse_iou_kind(kind, "bbox_iou_backward");
  check_bbox_iou(box1, box2, eps, "bbox_iou_backward");
  check_iou_grad(grad, box1, box2, core::IouReduction::kNone, "bbox_iou_backward");
  return empty_box_grads(box1, box2, output_mask);
}

std::tuple<at::Tensor, at::Tensor> iou_loss_backward_meta(const at::Tensor& grad, const at::Tensor& box1,
                                                          const at::Tensor& box2, std::string_view kind, bool,
                                                          std::string_view reduction, double eps,
                                                          std::array<bool, 2> output_mask) {
  parse_iou_kind(kind, "iou_loss_backward");
  check_bbox_iou(box1, box2, eps, "iou_loss_backward");
  check_iou_grad(grad, box1, box2, parse_iou_reduction(reduction, "iou_loss_backward"), "iou_loss_backward");
  return empty_box_grads(box1, box2, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  m.impl("bbox_iou", TORCH_FN(bbox_iou_meta));
  m.impl("bbox_iou_backward", TORCH_FN(bbox_iou_backward_meta));
  m.impl("iou_loss", TORCH_FN(iou_loss_meta));
  m.impl("iou_loss_backward", TORCH_FN(iou_loss_backward_meta));
}

}  // namespace torch_fastdet
