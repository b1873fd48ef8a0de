// Shapes of the metrics operators.
#include <torch/library.h>

#include "ops/metrics/run.h"

namespace torch_fastdet {
namespace {

at::Tensor match_detections_meta(const at::Tensor& detections, const at::Tensor& labels, const at::Tensor& iouv,
                                 const std::optional<at::Tensor>& counts, std::string_view rule) {
  check_match_detections(detections, labels, iouv, counts, "match_detections");
  parse_match_rule(rule, "match_detections");
  return match_shape(detections, iouv);
}

void confusion_matrix_meta(const at::Tensor& matrix, const at::Tensor& detections, const at::Tensor& labels,
                           const std::optional<at::Tensor>& counts, double, double, std::string_view rule) {
  check_confusion_matrix(matrix, detections, labels, counts, "confusion_matrix_");
  parse_match_rule(rule, "confusion_matrix_");
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  m.impl("match_detections", match_detections_meta);
  m.impl("confusion_matrix_", confusion_matrix_meta);
}

}  // namespace torch_fastdet
