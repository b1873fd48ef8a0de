// Run bbox_iou, iou_loss and their backwards except the loops, which are Backend::run(params, op) of cpu.cpp and
// cuda.cpp. Backend::loss_partials(pairs) is the size of iou_loss's workspace.
#pragma once

#include <array>

#include "ops/boxes/checks.h"
#include "ops/common/backend.h"

namespace torch_fastdet {

struct IouLossOptions {
  std::string_view kind;
  bool xywh;
  std::string_view reduction;
  double eps;
  using Types = std::tuple<std::string_view, bool, std::string_view, double>;

  core::IouConfig config(const char* op) const { return {parse_iou_kind(kind, op), xywh, eps}; }
};

// Return both gradients, uninitialized; one that is not wanted has no elements.
inline std::tuple<at::Tensor, at::Tensor> empty_box_grads(const at::Tensor& box1, const at::Tensor& box2,
                                                          std::array<bool, 2> output_mask) {
  const auto grad_of = [](const at::Tensor& box, bool wanted) {
    return wanted ? at::empty_symint(box.sym_sizes(), box.options()) : at::empty({0}, box.options());
  };
  return {grad_of(box1, output_mask[0]), grad_of(box2, output_mask[1])};
}

// Return the uninitialized result of bbox_iou or iou_loss, whose sizes may be symbolic.
inline at::Tensor empty_iou(const at::Tensor& box1, const at::Tensor& box2, core::IouReduction reduction) {
  const at::SymDimVector shape =
      reduction == core::IouReduction::kNone ? iou_sym_shape(box1, box2) : at::SymDimVector();
  return at::empty_symint(shape, box1.options().dtype(iou_dtype(box1, box2)));
}

template <class Backend>
at::Tensor iou_of_pairs(const at::Tensor& box1, const at::Tensor& box2, const core::IouConfig& config, bool loss,
                        const char* op) {
  const c10::DeviceGuard guard(box1.device());
  const at::DimVector shape = iou_shape(box1, box2);
  const at::ScalarType dtype = iou_dtype(box1, box2);
  at::Tensor out = at::empty(shape, box1.options().dtype(dtype));
  const core::BboxIouParams params{boxes_in(box1),   boxes_in(box2), pairs_plan(box1, box2, shape, op),
                                   config,           loss,           out.mutable_data_ptr(),
                                   core_dtype(dtype)};
  Backend::run(params, op);
  return out;
}

template <class Backend>
at::Tensor iou_loss_of_all(const at::Tensor& box1, const at::Tensor& box2, const core::IouConfig& config,
                           core::IouReduction reduction, const char* op) {
  const c10::DeviceGuard guard(box1.device());
  const at::ScalarType dtype = iou_dtype(box1, box2);
  core::IouLossParams params{boxes_in(box1), boxes_in(box2), pairs_plan(box1, box2, iou_shape(box1, box2), op), config,
                             reduction};
  at::Tensor partial;
  if (const int64_t partials = Backend::loss_partials(params.pairs.numel)) {
    partial = at::empty({partials}, box1.options().dtype(arithmetic_type(dtype)));
    params.partial = partial.mutable_data_ptr();
  }
  at::Tensor out = at::empty({}, box1.options().dtype(dtype));
  params.out = out.mutable_data_ptr();
  params.out_dtype = core_dtype(dtype);
  Backend::run(params, op);
  return out;
}

template <class Backend>
at::Tensor bbox_iou(const at::Tensor& box1, const at::Tensor& box2, bool xywh, bool giou, bool diou, bool ciou,
                    double eps) {
  constexpr const char* kOp = "bbox_iou";
  check_bbox_iou(box1, box2, eps, kOp);
  if constexpr (Backend::kMeta) {
    return empty_iou(box1, box2, core::IouReduction::kNone);
  } else {
    return iou_of_pairs<Backend>(box1, box2, {kind_from_flags(giou, diou, ciou), xywh, eps}, /*loss=*/false, kOp);
  }
}

template <class Backend>
at::Tensor iou_loss(const at::Tensor& box1, const at::Tensor& box2, const IouLossOptions& options) {
  constexpr const char* kOp = "iou_loss";
  const core::IouConfig config = options.config(kOp);
  const core::IouReduction reduction = parse_iou_reduction(options.reduction, kOp);
  check_bbox_iou(box1, box2, config.eps, kOp);
  if constexpr (Backend::kMeta) {
    return empty_iou(box1, box2, reduction);
  } else if (reduction == core::IouReduction::kNone) {
    return iou_of_pairs<Backend>(box1, box2, config, /*loss=*/true, kOp);
  } else {
    return iou_loss_of_all<Backend>(box1, box2, config, reduction, kOp);
  }
}

template <class Backend>
std::tuple<at::Tensor, at::Tensor> iou_grads(const at::Tensor& grad, const at::Tensor& box1, const at::Tensor& box2,
                                             const core::IouConfig& config, double grad_scale,
                                             std::array<bool, 2> output_mask, const char* op) {
  const c10::DeviceGuard guard(box1.device());
  auto [grad1, grad2] = empty_box_grads(box1, box2, output_mask);
  if constexpr (!Backend::kMeta) {
    const core::IouBackwardParams params =
        backward_params(grad, box1, box2, config, grad_scale, output_mask[0] ? grad1.mutable_data_ptr() : nullptr,
                        output_mask[1] ? grad2.mutable_data_ptr() : nullptr, op);
    Backend::run(params, op);
  }
  return {grad1, grad2};
}

template <class Backend>
std::tuple<at::Tensor, at::Tensor> bbox_iou_backward(const at::Tensor& grad, const at::Tensor& box1,
                                                     const at::Tensor& box2, std::string_view kind, bool xywh,
                                                     double eps, std::array<bool, 2> output_mask) {
  constexpr const char* kOp = "bbox_iou_backward";
  const core::IouConfig config{parse_iou_kind(kind, kOp), xywh, eps};
  check_bbox_iou(box1, box2, eps, kOp);
  check_iou_grad(grad, box1, box2, core::IouReduction::kNone, kOp);
  return iou_grads<Backend>(grad, box1, box2, config, 1.0, output_mask, kOp);
}

template <class Backend>
std::tuple<at::Tensor, at::Tensor> iou_loss_backward(const at::Tensor& grad, const at::Tensor& box1,
                                                     const at::Tensor& box2, const IouLossOptions& options,
                                                     std::array<bool, 2> output_mask) {
  constexpr const char* kOp = "iou_loss_backward";
  const core::IouConfig config = options.config(kOp);
  const core::IouReduction reduction = parse_iou_reduction(options.reduction, kOp);
  check_bbox_iou(box1, box2, config.eps, kOp);
  check_iou_grad(grad, box1, box2, reduction, kOp);
  double scale = -1.0;
  if constexpr (!Backend::kMeta) {
    if (reduction == core::IouReduction::kMean) {
      scale /= static_cast<double>(c10::multiply_integers(iou_shape(box1, box2)));
    }
  }
  return iou_grads<Backend>(grad, box1, box2, config, scale, output_mask, kOp);
}

template <class Backend>
void register_boxes(torch::Library& m) {
  m.impl("bbox_iou", TORCH_FN(bbox_iou<Backend>));
  m.impl("bbox_iou_backward", TORCH_FN(bbox_iou_backward<Backend>));
  m.impl("iou_loss", unpack<&iou_loss<Backend>>);
  m.impl("iou_loss_backward", unpack<&iou_loss_backward<Backend>>);
}

}  // namespace torch_fastdet
