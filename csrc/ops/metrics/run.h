// Run match_detections and confusion_matrix_ except the loop over images: check, allocate, set the parameters, and pass
// them to Backend::run(params, op), which cpu.cpp and cuda.cpp each define. Meta runs nothing.
#pragma once

#include "ops/common/backend.h"
#include "ops/metrics/checks.h"

namespace torch_fastdet {

struct ConfusionOptions {
  double conf, iou_thres;
  std::string_view rule;
  using Types = std::tuple<double, double, std::string_view>;
};

// Launches count blocks in 32 bits, and a workspace counts rows and labels in 32 bits.
inline void check_match_size(const core::MatchInput& in, const char* op) {
  constexpr int64_t kMost = 2147483647;
  TORCH_CHECK_VALUE(in.images <= kMost && in.count < kMost && in.label_count <= kMost, op, ": ", in.images, " images, ",
                    in.count, " detections and ", in.label_count, " labels came, but each must be less than 2**31");
}

inline at::Tensor match_shape(const at::Tensor& detections, const at::Tensor& iouv) {
  c10::SymDimVector shape(detections.sym_sizes().begin(), detections.sym_sizes().end());
  shape.back() = iouv.sym_size(0);
  return at::empty_symint(shape, detections.options().dtype(at::kBool));
}

template <class Backend>
at::Tensor match_detections(const at::Tensor& detections, const at::Tensor& labels, const at::Tensor& iouv,
                            const std::optional<at::Tensor>& counts, std::string_view rule,
                            const std::optional<at::Tensor>& iou) {
  constexpr const char* kOp = "match_detections";
  check_match_detections(detections, labels, iouv, counts, iou, kOp);
  const core::MatchRule parsed = parse_match_rule(rule, kOp);
  const c10::DeviceGuard guard(detections.device());
  at::Tensor correct = match_shape(detections, iouv);
  if constexpr (!Backend::kMeta) {
    const at::Tensor rows = dense_float_rows(detections), truth = dense_float_rows(labels);
    const at::Tensor thresholds = iouv.to(at::kFloat).contiguous();
    const at::Tensor valid = counts ? counts->contiguous() : at::Tensor();
    const auto ints = detections.options().dtype(at::kInt);
    core::MatchParams params;
    const at::Tensor overlaps = iou ? iou->to(at::kFloat).contiguous() : at::Tensor();
    params.in = match_input(rows, truth, valid, overlaps, parsed);
    check_match_size(params.in, kOp);
    params.thresholds = thresholds.const_data_ptr<float>();
    params.threshold_count = thresholds.size(0);
    params.correct = correct.mutable_data_ptr<bool>();
    at::Tensor claims = at::empty({params.in.label_count * params.threshold_count}, ints);
    at::Tensor best = at::empty({params.in.images * params.in.count}, ints);
    params.claims = claims.mutable_data_ptr<int32_t>();
    params.best = best.mutable_data_ptr<int32_t>();
    Backend::run(params, kOp);
  }
  return correct;
}

template <class Backend>
void confusion_matrix_(const at::Tensor& matrix, const at::Tensor& detections, const at::Tensor& labels,
                       const std::optional<at::Tensor>& counts, const ConfusionOptions& options,
                       const std::optional<at::Tensor>& iou) {
  constexpr const char* kOp = "confusion_matrix_";
  check_confusion_matrix(matrix, detections, labels, counts, iou, kOp);
  const core::MatchRule rule = parse_match_rule(options.rule, kOp);
  if constexpr (!Backend::kMeta) {
    const c10::DeviceGuard guard(detections.device());
    const at::Tensor rows = dense_float_rows(detections), truth = dense_float_rows(labels);
    const at::Tensor valid = counts ? counts->contiguous() : at::Tensor();
    const at::Tensor overlaps = iou ? iou->to(at::kFloat).contiguous() : at::Tensor();
    core::ConfusionParams params;
    params.in = match_input(rows, truth, valid, overlaps, rule);
    check_match_size(params.in, kOp);
    params.confidence = static_cast<float>(options.conf);
    params.iou_threshold = static_cast<float>(options.iou_thres);
    params.classes = matrix.size(0) - 1;
    params.matrix = matrix.mutable_data_ptr<int64_t>();
    at::Tensor claims = at::empty({params.in.label_count}, detections.options().dtype(at::kLong));
    at::Tensor matched = at::empty({params.in.images * params.in.count}, detections.options().dtype(at::kInt));
    params.claims = reinterpret_cast<uint64_t*>(claims.mutable_data_ptr<int64_t>());
    params.matched = matched.mutable_data_ptr<int32_t>();
    Backend::run(params, kOp);
  }
}

template <class Backend>
void register_metrics(torch::Library& m) {
  m.impl("match_detections", TORCH_FN(match_detections<Backend>));
  m.impl("confusion_matrix_", unpack<&confusion_matrix_<Backend>>);
}

}  // namespace torch_fastdet
