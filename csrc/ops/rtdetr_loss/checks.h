// Check the arguments of rtdetr_loss, and define its options and results.
#pragma once

#include "core/rtdetr_loss/rtdetr_loss.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline constexpr const char* kRtdetrLoss = "rtdetr_loss";

struct RtdetrLossOptions {
  double class_gain, box_gain, giou_gain, class_cost, box_cost, giou_cost;
  using Types = std::tuple<double, double, double, double, double, double>;
};

struct RtdetrLossState {
  at::Tensor owner, quality, scales;
  using Types = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
};

inline void check_rtdetr_sets(const at::Tensor& boxes, const at::Tensor& scores, const std::string& prefix) {
  const std::string boxes_name = prefix + "boxes", scores_name = prefix + "scores";
  check_operand(boxes, boxes_name.c_str(), boxes, kRtdetrLoss, boxes_name.c_str());
  check_operand(boxes, boxes_name.c_str(), scores, kRtdetrLoss, scores_name.c_str());
  TORCH_CHECK(boxes.dim() == 4, kRtdetrLoss, ": ", boxes_name, " has shape ", boxes.sym_sizes(),
              ", but (sets, images, queries, 4) is expected");
  TORCH_CHECK(scores.dim() == 4, kRtdetrLoss, ": ", scores_name, " has shape ", scores.sym_sizes(),
              ", but (sets, images, queries, classes) is expected");
  TORCH_SYM_CHECK(boxes.sym_size(3).sym_eq(4).sym_and(same_sizes(boxes, scores, {0, 1, 2})), kRtdetrLoss, ": ",
                  boxes_name, " has shape ", boxes.sym_sizes(), ", but four numbers for each query of ", scores_name,
                  " of shape ", scores.sym_sizes(), " are expected");
}

inline void check_rtdetr_targets(const at::Tensor& boxes, const at::Tensor& targets, const at::Tensor& counts) {
  check_strided(targets, kRtdetrLoss, "targets");
  check_strided(counts, kRtdetrLoss, "counts");
  check_same_device(boxes, "boxes", targets, kRtdetrLoss, "targets");
  check_same_device(boxes, "boxes", counts, kRtdetrLoss, "counts");
  check_dtype(targets, at::kFloat, kRtdetrLoss, "targets");
  check_dtype(counts, at::kLong, kRtdetrLoss, "counts");
  TORCH_CHECK(targets.dim() == 3, kRtdetrLoss, ": targets has shape ", targets.sym_sizes(),
              ", but (images, most targets, 5) is expected");
  TORCH_CHECK(counts.dim() == 1, kRtdetrLoss, ": counts has shape ", counts.sym_sizes(),
              ", but one dimension (images) is expected");
  TORCH_SYM_CHECK(targets.sym_size(0).sym_eq(boxes.sym_size(1)).sym_and(targets.sym_size(2).sym_eq(5)), kRtdetrLoss,
                  ": targets has shape ", targets.sym_sizes(), ", but (", boxes.sym_size(1),
                  ", any, 5) is expected: class, x, y, width, height");
  TORCH_SYM_CHECK(counts.sym_size(0).sym_eq(boxes.sym_size(1)), kRtdetrLoss, ": counts has shape ", counts.sym_sizes(),
                  ", but one number for each of ", boxes.sym_size(1), " images is expected");
}

// Check denoising sets against the others. dn_matches is for the forward pass.
inline void check_rtdetr_denoising(const at::Tensor& boxes, const at::Tensor& scores, const at::Tensor& dn_boxes,
                                   const at::Tensor& dn_scores) {
  check_rtdetr_sets(dn_boxes, dn_scores, "dn_");
  check_same_device(boxes, "boxes", dn_boxes, kRtdetrLoss, "dn_boxes");
  TORCH_CHECK(dn_scores.scalar_type() == scores.scalar_type(), kRtdetrLoss, ": dn_scores has dtype ",
              dtype_name(dn_scores.scalar_type()), ", but ", dtype_name(scores.scalar_type()),
              " is expected beside scores");
  TORCH_SYM_CHECK(
      dn_boxes.sym_size(1).sym_eq(boxes.sym_size(1)).sym_and(dn_scores.sym_size(3).sym_eq(scores.sym_size(3))),
      kRtdetrLoss, ": dn_scores has shape ", dn_scores.sym_sizes(), ", but (any, ", boxes.sym_size(1), ", any, ",
      scores.sym_size(3), ") is expected beside scores of shape ", scores.sym_sizes());
}

inline void check_rtdetr_loss(const at::Tensor& boxes, const at::Tensor& scores, const at::Tensor& targets,
                              const at::Tensor& counts, const std::optional<at::Tensor>& dn_boxes,
                              const std::optional<at::Tensor>& dn_scores, const std::optional<at::Tensor>& dn_matches) {
  check_rtdetr_sets(boxes, scores, "");
  check_rtdetr_targets(boxes, targets, counts);
  TORCH_CHECK(dn_boxes.has_value() == dn_scores.has_value() && dn_boxes.has_value() == dn_matches.has_value(),
              kRtdetrLoss, ": dn_boxes, dn_scores and dn_matches are expected together, but only some of them came");
  if (!dn_boxes) return;
  check_rtdetr_denoising(boxes, scores, *dn_boxes, *dn_scores);
  check_strided(*dn_matches, kRtdetrLoss, "dn_matches");
  check_same_device(boxes, "boxes", *dn_matches, kRtdetrLoss, "dn_matches");
  check_dtype(*dn_matches, at::kLong, kRtdetrLoss, "dn_matches");
  TORCH_CHECK(dn_matches->dim() == 2, kRtdetrLoss, ": dn_matches has shape ", dn_matches->sym_sizes(),
              ", but (images, denoising queries) is expected");
  TORCH_SYM_CHECK(
      dn_matches->sym_size(0).sym_eq(boxes.sym_size(1)).sym_and(dn_matches->sym_size(1).sym_eq(dn_boxes->sym_size(2))),
      kRtdetrLoss, ": dn_matches has shape ", dn_matches->sym_sizes(), ", but one number for each of ",
      dn_boxes->sym_size(2), " queries of ", boxes.sym_size(1), " images is expected");
}

}  // namespace torch_fastdet
