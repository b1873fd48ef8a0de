// Check the arguments of match_detections and confusion_matrix_, and turn tensors into core::MatchInput.
#pragma once

#include <string_view>

#include "core/metrics/metrics.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline core::MatchRule parse_match_rule(std::string_view rule, const char* op) {
  if (rule == "best") return core::MatchRule::kBest;
  if (rule == "greedy") return core::MatchRule::kGreedy;
  TORCH_CHECK_VALUE(false, op, ": rule is '", rule, "', but 'best' or 'greedy' is expected");
}

inline void check_match_input(const at::Tensor& detections, const at::Tensor& labels,
                              const std::optional<at::Tensor>& counts, const std::optional<at::Tensor>& iou,
                              const char* op) {
  check_strided(detections, op, "detections");
  check_strided(labels, op, "labels");
  check_float(detections, op, "detections");
  check_same_device(detections, "detections", labels, op, "labels");
  TORCH_CHECK(detections.dim() == 2 || detections.dim() == 3, op, ": detections has shape ", detections.sym_sizes(),
              ", but (n, 6 or more) or (images, n, 6 or more) is expected");
  TORCH_SYM_CHECK(detections.sym_size(-1).sym_ge(6), op, ": detections has shape ", detections.sym_sizes(),
                  ", but 6 or more columns (x1, y1, x2, y2, confidence, class) are expected");
  const bool batched = detections.dim() == 3;
  TORCH_CHECK(labels.dim() == 2, op, ": labels has shape ", labels.sym_sizes(), ", but two dimensions are expected");
  TORCH_SYM_CHECK(labels.sym_size(1).sym_eq(batched ? 6 : 5), op, ": labels has shape ", labels.sym_sizes(),
                  batched ? ", but 6 columns (image, class, x1, y1, x2, y2) are expected"
                          : ", but 5 columns (class, x1, y1, x2, y2) are expected");
  if (iou) {
    check_operand(detections, "detections", *iou, op, "iou");
    TORCH_CHECK(iou->dim() == 2, op, ": iou has shape ", iou->sym_sizes(), ", but two dimensions are expected");
    TORCH_SYM_CHECK(
        iou->sym_size(0).sym_eq(labels.sym_size(0)).sym_and(iou->sym_size(1).sym_eq(detections.sym_size(-2))), op,
        ": iou has shape ", iou->sym_sizes(), ", but a row for each of ", labels.sym_size(0),
        " labels and a column for each of ", detections.sym_size(-2), " detections are expected");
  }
  if (!counts) return;
  TORCH_CHECK(batched, op, ": counts came with detections of shape ", detections.sym_sizes(),
              ", but they need detections of shape (images, n, 6 or more)");
  check_same_device(detections, "detections", *counts, op, "counts");
  check_dtype(*counts, at::kLong, op, "counts");
  TORCH_CHECK(counts->dim() == 1, op, ": counts has shape ", counts->sym_sizes(), ", but one dimension is expected");
  TORCH_SYM_CHECK(counts->sym_size(0).sym_eq(detections.sym_size(0)), op, ": counts has shape ", counts->sym_sizes(),
                  ", but one count for each of ", detections.sym_size(0), " images is expected");
}

inline void check_match_detections(const at::Tensor& detections, const at::Tensor& labels, const at::Tensor& iouv,
                                   const std::optional<at::Tensor>& counts, const std::optional<at::Tensor>& iou,
                                   const char* op) {
  check_match_input(detections, labels, counts, iou, op);
  check_operand(detections, "detections", iouv, op, "iouv");
  TORCH_CHECK(iouv.dim() == 1, op, ": iouv has shape ", iouv.sym_sizes(), ", but one dimension is expected");
}

inline void check_confusion_matrix(const at::Tensor& matrix, const at::Tensor& detections, const at::Tensor& labels,
                                   const std::optional<at::Tensor>& counts, const std::optional<at::Tensor>& iou,
                                   const char* op) {
  check_match_input(detections, labels, counts, iou, op);
  check_same_device(detections, "detections", matrix, op, "matrix");
  check_dtype(matrix, at::kLong, op, "matrix");
  TORCH_CHECK(matrix.dim() == 2 && matrix.is_contiguous(), op, ": matrix has shape ", matrix.sym_sizes(),
              ", but a contiguous (classes + 1, classes + 1) is expected");
  TORCH_SYM_CHECK(matrix.sym_size(0).sym_eq(matrix.sym_size(1)).sym_and(matrix.sym_size(0).sym_ge(1)), op,
                  ": matrix has shape ", matrix.sym_sizes(), ", but (classes + 1, classes + 1) is expected");
}

// The tensors must outlive the result.
inline core::MatchInput match_input(const at::Tensor& detections, const at::Tensor& labels, const at::Tensor& counts,
                                    const at::Tensor& iou, core::MatchRule rule) {
  core::MatchInput in;
  const bool batched = detections.dim() == 3;
  in.detections = detections.const_data_ptr<float>();
  in.images = batched ? detections.size(0) : 1;
  in.count = detections.size(-2);
  in.image_stride = batched ? detections.stride(0) : 0;
  in.row_stride = detections.stride(-2);
  in.counts = counts.defined() ? counts.const_data_ptr<int64_t>() : nullptr;
  in.labels = labels.const_data_ptr<float>();
  in.label_count = labels.size(0);
  in.label_stride = labels.stride(0);
  in.labels_name_image = batched;
  in.iou = iou.defined() ? iou.const_data_ptr<float>() : nullptr;
  in.rule = rule;
  return in;
}

}  // namespace torch_fastdet
