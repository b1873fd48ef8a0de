// Run the keypoint parts of the pose loss, for v8_loss's slots, except the arithmetic, as run.h does for detection.
#pragma once

#include "core/v8_loss/v8_keypoint_loss.h"
#include "core/v8_loss/v8_posed_loss.h"
#include "ops/v8_loss/scratch.h"

namespace torch_fastdet {

// Hold the labels of the loss: labels (n, keypoints, 2 or 3) float32, sigmas (keypoints) float32.
struct V8KeypointLabels {
  const at::Tensor &labels, &sigmas, &targets, &slot_anchor, &slot_row;
  using Types =
      std::tuple<const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&>;
};

// The result is loss, items and scales.
using V8KeypointLossResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

inline void check_v8_keypoints(const at::Tensor& predictions, const at::Tensor& labels, const at::Tensor& sigmas,
                               const at::Tensor& targets, const V8Levels<>& levels, const char* op) {
  const auto& [strides, sizes] = levels;
  check_strided(predictions, op, "predictions");
  check_float(predictions, op, "predictions");
  TORCH_CHECK(!strides.empty() && strides.size() <= core::kV8MaxLevels && sizes.size() == 2 * strides.size(), op,
              ": strides has ", strides.size(), " levels and sizes ", sizes.size(),
              " numbers, but height and width of 1 to ", core::kV8MaxLevels, " levels are expected");
  int64_t anchors = 0;
  for (size_t level = 0; level < strides.size(); ++level) anchors += sizes[2 * level] * sizes[2 * level + 1];
  TORCH_CHECK(labels.dim() == 3 && (labels.size(2) == 2 || labels.size(2) == 3) && labels.size(1) > 0 &&
                  labels.size(0) == targets.size(0) && labels.scalar_type() == at::kFloat,
              op, ": labels is ", dtype_name(labels.scalar_type()), " of shape ", labels.sizes(),
              ", but float32 of shape (", targets.size(0), ", keypoints, 2 or 3) is expected");
  const int64_t keypoints = labels.size(1);
  TORCH_CHECK(predictions.dim() == 3 && predictions.size(0) > 0 && predictions.size(2) == anchors && anchors > 0 &&
                  (predictions.size(1) == 2 * keypoints || predictions.size(1) == 3 * keypoints),
              op, ": predictions has shape ", predictions.sizes(), ", but (bs, ", 2 * keypoints, " or ", 3 * keypoints,
              ", ", anchors, ") is expected for ", keypoints, " keypoints");
  TORCH_CHECK(sigmas.scalar_type() == at::kFloat && sigmas.numel() == keypoints, op, ": sigmas is ",
              dtype_name(sigmas.scalar_type()), " of shape ", sigmas.sizes(), ", but ", keypoints,
              " float32 are expected");
  check_same_device(predictions, "predictions", labels, op, "labels");
  check_same_device(predictions, "predictions", sigmas, op, "sigmas");
}

inline void check_v8_keypoints(const at::Tensor& predictions, const V8KeypointLabels& given, const V8Levels<>& levels,
                               const char* op) {
  check_v8_keypoints(predictions, given.labels, given.sigmas, given.targets, levels, op);
  check_v8_slots(given.targets, given.slot_anchor, given.slot_row, predictions, "predictions", op);
}

// `rows`, `labels` and `sigmas` must be contiguous. The slots may be undefined.
inline core::V8KeypointProblem v8_keypoint_problem(const at::Tensor& predictions, const V8KeypointLabels& given,
                                                   const V8Levels<>& levels, bool centered) {
  core::V8KeypointProblem problem{};
  problem.centered = centered;
  problem.dtype = core_dtype(predictions.scalar_type());
  problem.predictions = predictions.const_data_ptr();
  problem.stride_b = predictions.stride(0);
  problem.stride_c = predictions.stride(1);
  problem.stride_a = predictions.stride(2);
  problem.heads.bs = predictions.size(0);
  v8_set_levels(problem.heads, levels);
  problem.labels = given.labels.const_data_ptr<float>();
  problem.targets = given.targets.const_data_ptr<float>();
  problem.sigmas = given.sigmas.const_data_ptr<float>();
  if (given.slot_anchor.defined()) {
    problem.slot_anchor = given.slot_anchor.const_data_ptr<int64_t>();
    problem.slot_row = given.slot_row.const_data_ptr<int64_t>();
    problem.slots = given.slot_anchor.numel();
  }
  problem.keypoints = static_cast<int32_t>(given.labels.size(1));
  problem.columns = static_cast<int32_t>(predictions.size(1) / given.labels.size(1));
  problem.label_columns = static_cast<int32_t>(given.labels.size(2));
  return problem;
}

template <class Backend>
V8KeypointLossResult v8_keypoint_loss(const at::Tensor& predictions, const V8KeypointLabels& given,
                                      const at::Tensor& gains, const at::Tensor& settings,
                                      const V8LevelsOn<Backend>& levels, bool centered) {
  constexpr auto op = "v8_keypoint_loss";
  const auto scalar = arithmetic_options(predictions);
  check_plain<Backend>(levels, {predictions, given.labels, given.targets, given.slot_anchor}, {},
                       [&](const V8Levels<>& plain) { check_v8_keypoints(predictions, given, plain, op); });
  V8KeypointLossResult result{at::empty({2}, scalar), at::empty({2}, scalar), at::empty({2}, scalar)};
  if constexpr (!Backend::kMeta) {
    check_v8_settings(predictions, "predictions", settings, std::nullopt, op);
    TORCH_CHECK(gains.scalar_type() == at::kDouble && gains.numel() == 2 && gains.is_contiguous(), op, ": gains is ",
                dtype_name(gains.scalar_type()), " of shape ", gains.sizes(),
                ", but two float64 are expected, of the pose and the kobj part");
    check_same_device(predictions, "predictions", gains, op, "gains");
    const c10::DeviceGuard guard(predictions.device());
    const auto& [loss, items, scales] = result;
    const auto labels = given.labels.contiguous(), sigmas = given.sigmas.contiguous(),
               targets = given.targets.contiguous(), values = settings.contiguous();
    core::V8KeypointLossParams params{};
    params.problem = v8_keypoint_problem(predictions, {labels, sigmas, targets, given.slot_anchor, given.slot_row},
                                         levels, centered);
    params.gains = gains.template const_data_ptr<double>();
    params.settings = values.template const_data_ptr<double>();
    const auto partials = at::empty({params.problem.slots, 2}, scalar);
    params.partials = partials.mutable_data_ptr();
    params.loss = loss.mutable_data_ptr();
    params.items = items.mutable_data_ptr();
    params.scales = scales.mutable_data_ptr();
    Backend::run(params, op);
  }
  return result;
}

// The gradient has the layout of the predictions if they are dense.
template <class Backend>
at::Tensor v8_keypoint_loss_backward(const at::Tensor& grad_loss, const at::Tensor& predictions,
                                     const V8KeypointLabels& given, const at::Tensor& scales,
                                     const V8LevelsOn<Backend>& levels, bool centered) {
  constexpr auto op = "v8_keypoint_loss_backward";
  auto gradient = empty_dense_like(predictions, predictions.is_non_overlapping_and_dense());
  if constexpr (!Backend::kMeta) {
    check_v8_keypoints(predictions, given, levels, op);
    const auto scalar = arithmetic_type(predictions);
    TORCH_CHECK(grad_loss.dim() == 1 && grad_loss.size(0) == 2 && grad_loss.scalar_type() == scalar, op,
                ": grad_loss is ", dtype_name(grad_loss.scalar_type()), " of shape ", grad_loss.sizes(), ", but two ",
                dtype_name(scalar), " are expected");
    TORCH_CHECK(scales.numel() == 2 && scales.scalar_type() == scalar && scales.is_contiguous(), op,
                ": scales is not what v8_keypoint_loss returned");
    check_same_device(predictions, "predictions", grad_loss, op, "grad_loss");
    check_same_device(predictions, "predictions", scales, op, "scales");
    const c10::DeviceGuard guard(predictions.device());
    const auto labels = given.labels.contiguous(), sigmas = given.sigmas.contiguous(),
               targets = given.targets.contiguous();
    core::V8KeypointLossBackwardParams params{};
    params.problem = v8_keypoint_problem(predictions, {labels, sigmas, targets, given.slot_anchor, given.slot_row},
                                         levels, centered);
    params.scales = scales.const_data_ptr();
    params.grad_loss = grad_loss.const_data_ptr();
    params.grad_stride = grad_loss.stride(0);
    params.gradient = gradient.mutable_data_ptr();
    params.gradient_b = gradient.stride(0);
    params.gradient_c = gradient.stride(1);
    params.gradient_a = gradient.stride(2);
    Backend::run(params, op);
  }
  return gradient;
}

struct V8PoseInputs {
  const at::Tensor &predictions, &labels, &sigmas;
  using Types = std::tuple<const at::Tensor&, const at::Tensor&, const at::Tensor&>;
};

// Run the detection loss whose assignment compares keypoints, as run.h does for detection, whose backward it shares.
template <class Backend>
V8LossResult v8_posed_loss(at::TensorList heads, const V8PoseInputs& inputs,
                           const V8LossArguments<V8Int<Backend>>& arguments) {
  constexpr auto op = "v8_posed_loss";
  const auto& predictions = inputs.predictions;
  const auto& targets = arguments.targets;
  const auto levels = arguments.levels();
  check_plain<Backend>(levels, {targets, predictions, inputs.labels}, heads, [&](const V8Levels<>& plain) {
    check_v8_loss(heads, plain, arguments, op);
    TORCH_CHECK(v8_is_joined(heads), op, ": ", heads.size(),
                " heads came, but boxes and scores of all levels are expected");
    check_v8_keypoints(predictions, inputs.labels, inputs.sigmas, targets, plain, op);
    TORCH_CHECK(predictions.size(0) == heads[0].size(0) && predictions.scalar_type() == heads[0].scalar_type(), op,
                ": predictions is ", dtype_name(predictions.scalar_type()), " of shape ", predictions.sizes(),
                ", but the batch and the dtype of the heads are expected, ", heads[0].size(0), " and ",
                dtype_name(heads[0].scalar_type()));
    check_same_device(heads[0], "heads[0]", predictions, op, "predictions");
  });
  if constexpr (Backend::kMeta) {
    return empty_v8_loss(heads[0], targets, arguments.topk, 3);
  } else {
    const c10::DeviceGuard guard(heads[0].device());
    const auto labels = inputs.labels.contiguous(), sigmas = inputs.sigmas.contiguous();
    const auto fill = [&](core::V8PosedLossParams& params, const at::Tensor& rows) {
      params.keypoints = v8_keypoint_problem(predictions, {labels, sigmas, rows, {}, {}}, levels, true);
    };
    return v8_run<Backend, core::V8PosedLossParams>(heads, arguments, op, fill);
  }
}

template <class Backend>
void register_v8_keypoint_loss(torch::Library& m) {
  m.impl("v8_keypoint_loss", unpack<&v8_keypoint_loss<Backend>>);
  m.impl("v8_keypoint_loss_backward", unpack<&v8_keypoint_loss_backward<Backend>>);
  m.impl("v8_posed_loss", unpack<&v8_posed_loss<Backend>>);
}

}  // namespace torch_fastdet
