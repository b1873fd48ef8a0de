// Check the arguments of bbox_iou, iou_loss and their backwards, and make launch parameters of them.
#pragma once

#include <ATen/ExpandUtils.h>

#include <array>
#include <string_view>

#include "core/boxes/bbox_iou.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline core::IouKind kind_from_flags(bool giou, bool diou, bool ciou) {
  return ciou ? core::IouKind::kCiou : diou ? core::IouKind::kDiou : giou ? core::IouKind::kGiou : core::IouKind::kIou;
}

inline core::IouKind parse_iou_kind(std::string_view kind, const char* op) {
  if (kind == "ciou") return core::IouKind::kCiou;
  if (kind == "iou") return core::IouKind::kIou;
  if (kind == "giou") return core::IouKind::kGiou;
  if (kind == "diou") return core::IouKind::kDiou;
  TORCH_CHECK_VALUE(false, op, ": kind is '", kind, "', but 'iou', 'giou', 'diou' or 'ciou' is expected");
}

inline const char* iou_kind_name(core::IouKind kind) {
  constexpr const char* kNames[] = {"iou", "giou", "diou", "ciou"};
  return kNames[static_cast<int>(kind)];
}

inline core::IouReduction parse_iou_reduction(std::string_view reduction, const char* op) {
  if (reduction == "mean") return core::IouReduction::kMean;
  if (reduction == "sum") return core::IouReduction::kSum;
  if (reduction == "none") return core::IouReduction::kNone;
  TORCH_CHECK_VALUE(false, op, ": reduction is '", reduction, "', but 'none', 'mean' or 'sum' is expected");
}

inline void check_box_tensor(const at::Tensor& box, const char* op, const char* name) {
  check_strided(box, op, name);
  check_float(box, op, name);
  TORCH_CHECK(box.dim() >= 1, op, ": ", name, " is a scalar, but a tensor of shape (..., 4) is expected");
  TORCH_CHECK(box.sym_size(-1) == 4, op, ": ", name, " has shape ", box.sym_sizes(),
              ", but a last dimension of 4 is expected");
}

// Sizes are symbolic here, so that the same checks serve tracing with unknown shapes.
inline void check_bbox_iou(const at::Tensor& box1, const at::Tensor& box2, double eps, const char* op) {
  check_box_tensor(box1, op, "box1");
  check_box_tensor(box2, op, "box2");
  check_same_device(box1, "box1", box2, op, "box2");
  TORCH_CHECK_VALUE(eps >= 0, op, ": eps is ", eps, ", but a number that is not negative is expected");
  const auto sizes1 = box1.sym_sizes();
  const auto sizes2 = box2.sym_sizes();
  const size_t common = std::min(sizes1.size(), sizes2.size());
  for (size_t d = 2; d <= common; ++d) {
    const c10::SymInt& a = sizes1[sizes1.size() - d];
    const c10::SymInt& b = sizes2[sizes2.size() - d];
    const bool mismatch =
        TORCH_GUARD_OR_FALSE(a.sym_ne(b)) && TORCH_GUARD_OR_FALSE(a.sym_ne(1)) && TORCH_GUARD_OR_FALSE(b.sym_ne(1));
    TORCH_CHECK(!mismatch, op, ": box1 ", sizes1, " and box2 ", sizes2,
                " do not broadcast, but leading dimensions that are equal or 1 are expected");
  }
}

inline at::ScalarType iou_dtype(const at::Tensor& box1, const at::Tensor& box2) {
  return c10::promoteTypes(box1.scalar_type(), box2.scalar_type());
}

// Return the shape of bbox_iou's result: the boxes' broadcast shape with a last dimension of 1.
inline at::DimVector iou_shape(const at::Tensor& box1, const at::Tensor& box2) {
  at::DimVector shape = at::infer_size_dimvector(box1.sizes(), box2.sizes());
  shape.back() = 1;
  return shape;
}

// Return the same for sizes that may be symbolic, even data-dependent ones of boxes selected by a mask.
inline at::SymDimVector iou_sym_shape(const at::Tensor& box1, const at::Tensor& box2) {
  const bool first_longer = box1.dim() >= box2.dim();
  const auto longer = first_longer ? box1.sym_sizes() : box2.sym_sizes();
  const auto shorter = first_longer ? box2.sym_sizes() : box1.sym_sizes();
  at::SymDimVector shape(longer.begin(), longer.end());
  for (size_t d = 2; d <= shorter.size(); ++d) {
    c10::SymInt& size = shape[shape.size() - d];
    const c10::SymInt& other = shorter[shorter.size() - d];
    if (TORCH_GUARD_OR_FALSE(other.sym_eq(1))) continue;
    if (TORCH_GUARD_OR_FALSE(size.sym_eq(1))) {
      size = other;
      continue;
    }
    // Neither is known to be 1. Like PyTorch, assume that they are equal, which a traced graph checks.
    TORCH_SYM_CHECK(size.sym_eq(other), "box1 ", box1.sym_sizes(), " and box2 ", box2.sym_sizes(),
                    " do not broadcast, but leading dimensions that are equal or 1 are expected");
  }
  shape.back() = 1;
  return shape;
}

inline void check_iou_grad(const at::Tensor& grad, const at::Tensor& box1, const at::Tensor& box2,
                           core::IouReduction reduction, const char* op) {
  check_operand(box1, "box1", grad, op, "grad");
  const at::SymDimVector shape =
      reduction == core::IouReduction::kNone ? iou_sym_shape(box1, box2) : at::SymDimVector();
  bool same = grad.dim() == static_cast<int64_t>(shape.size());
  for (size_t d = 0; same && d < shape.size(); ++d) {
    same = !TORCH_GUARD_OR_FALSE(grad.sym_size(static_cast<int64_t>(d)).sym_ne(shape[d]));
  }
  TORCH_CHECK(same, op, ": grad has shape ", grad.sym_sizes(), ", but the result's shape ", c10::SymIntArrayRef(shape),
              " is expected");
}

inline core::BoxesIn boxes_in(const at::Tensor& box) {
  const int64_t item = static_cast<int64_t>(box.element_size());
  const int64_t vector = std::min<int64_t>(4 * item, 16);
  bool vectorised =
      box.stride(-1) == 1 && reinterpret_cast<uintptr_t>(box.const_data_ptr()) % static_cast<uintptr_t>(vector) == 0;
  for (int64_t d = 0; d + 1 < box.dim(); ++d) {
    vectorised = vectorised && (box.size(d) == 1 || box.stride(d) * item % vector == 0);
  }
  return {box.const_data_ptr(), box.stride(-1), core_dtype(box.scalar_type()), vectorised};
}

// Return the row stride of `tensor` along dimension d of `dims` leading dimensions, broadcast from the right.
inline int64_t broadcast_stride(const at::Tensor& tensor, int64_t d, int64_t dims) {
  const int64_t own = d - (dims - (tensor.dim() - 1));
  return own < 0 || tensor.size(own) == 1 ? 0 : tensor.stride(own);
}

template <int kOperands>
core::BroadcastPlan<kOperands> make_plan(const std::array<const at::Tensor*, kOperands>& operands,
                                         at::IntArrayRef shape, at::IntArrayRef order, const char* op) {
  core::BroadcastPlan<kOperands> plan;
  const int64_t dims = static_cast<int64_t>(shape.size()) - 1;
  for (const int64_t d : order) {
    int64_t strides[kOperands];
    for (int k = 0; k < kOperands; ++k) {
      // A reduced gradient is one scalar for all pairs.
      strides[k] = operands[k]->dim() == 0 ? 0 : broadcast_stride(*operands[k], d, dims);
    }
    TORCH_CHECK(plan.push(shape[d], strides), op, ": box1 ", operands[0]->sizes(), " and box2 ", operands[1]->sizes(),
                " have more than ", core::kMaxBroadcastDims,
                " leading dimensions that do not merge, but at most so many are expected; call .contiguous() first");
  }
  return plan;
}

// Order leading dimensions, fastest first.
inline at::DimVector row_major_order(at::IntArrayRef shape) {
  at::DimVector order;
  for (int64_t d = static_cast<int64_t>(shape.size()) - 2; d >= 0; --d) order.push_back(d);
  return order;
}

inline core::BroadcastPlan<2> pairs_plan(const at::Tensor& box1, const at::Tensor& box2, at::IntArrayRef shape,
                                         const char* op) {
  return make_plan<2>({&box1, &box2}, shape, row_major_order(shape), op);
}

// Return the pass for the gradient of `box` (box1 or box2). Its broadcast dimensions run fastest and are summed.
inline core::IouGradPass grad_pass(const at::Tensor& box, const at::Tensor& box1, const at::Tensor& box2,
                                   const at::Tensor& grad, at::IntArrayRef shape, const char* op) {
  const int64_t dims = static_cast<int64_t>(shape.size()) - 1;
  at::DimVector reduced;
  at::DimVector kept;
  core::IouGradPass pass;
  pass.rows = 1;
  for (const int64_t d : row_major_order(shape)) {
    const int64_t own = d - (dims - (box.dim() - 1));
    const bool broadcast = (own < 0 || box.size(own) == 1) && shape[d] != 1;
    (broadcast ? reduced : kept).push_back(d);
    (broadcast ? pass.reduce : pass.rows) *= shape[d];
  }
  reduced.append(kept.begin(), kept.end());
  pass.pairs = make_plan<3>({&box1, &box2, &grad}, shape, reduced, op);
  return pass;
}

// Return the parameters of a backward launch. `grad1` and `grad2` are null if not wanted.
inline core::IouBackwardParams backward_params(const at::Tensor& grad, const at::Tensor& box1, const at::Tensor& box2,
                                               const core::IouConfig& config, double grad_scale, void* grad1,
                                               void* grad2, const char* op) {
  core::IouBackwardParams params{
      boxes_in(box1), boxes_in(box2), config, grad.const_data_ptr(), core_dtype(grad.scalar_type()), grad_scale};
  const at::DimVector shape = iou_shape(box1, box2);
  core::IouGradPass pass1 = grad_pass(box1, box1, box2, grad, shape, op);
  core::IouGradPass pass2 = grad_pass(box2, box1, box2, grad, shape, op);
  pass1.grad1 = grad1;
  pass2.grad2 = grad2;
  if (pass1.reduce == 1 && pass2.reduce == 1) {
    pass1.grad2 = grad2;
    if (grad1 || grad2) params.pass[params.passes++] = pass1;
    return params;
  }
  if (grad1) params.pass[params.passes++] = pass1;
  if (grad2) params.pass[params.passes++] = pass2;
  return params;
}

}  // namespace torch_fastdet
