// Run the mask parts of the segmentation losses, for v8_loss's slots or yolov5_loss's matches, except the arithmetic.
#pragma once

#include <array>

#include "core/v8_loss/v8_mask_loss.h"
#include "ops/common/backend.h"
#include "ops/v8_loss/checks.h"

namespace torch_fastdet {

// The result is loss, item, scale, positives, first_positive and unit_gradients.
using V8MaskLossResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

struct V8MaskTensors {
  const at::Tensor &scale, &positives, &first_positive, &unit_gradients;
  using Types = std::tuple<const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&>;
};

template <class Backend>
using V8SymInts = at::ArrayRef<V8Int<Backend>>;

inline void check_v8_masks(const at::Tensor& coefficients, const at::Tensor& protos, const at::Tensor& masks,
                           bool overlap, const char* op, bool any_size = false) {
  for (const auto& [tensor, name] : {std::pair{&coefficients, "coefficients"}, std::pair{&protos, "protos"}}) {
    check_strided(*tensor, op, name);
    check_float(*tensor, op, name);
  }
  check_strided(masks, op, "masks");
  TORCH_CHECK(coefficients.dim() == 3 && protos.dim() == 4 && protos.size(0) == coefficients.size(0) &&
                  protos.size(1) == coefficients.size(1) && protos.numel() > 0 && coefficients.numel() > 0,
              op, ": coefficients has shape ", coefficients.sizes(), " and protos ", protos.sizes(),
              ", but (bs, channels, anchors) and (bs, channels, height, width) are expected, none empty");
  TORCH_CHECK(protos.size(1) <= core::kV8MostMaskChannels, op, ": protos has ", protos.size(1),
              " channels, but at most ", core::kV8MostMaskChannels, " are expected");
  TORCH_CHECK(protos.scalar_type() == coefficients.scalar_type(), op, ": protos is ", dtype_name(protos.scalar_type()),
              ", but coefficients is ", dtype_name(coefficients.scalar_type()), "; both must have one dtype");
  check_same_device(coefficients, "coefficients", protos, op, "protos");
  check_same_device(coefficients, "coefficients", masks, op, "masks");
  TORCH_CHECK(!masks.is_complex() && masks.dim() == 3 &&
                  (any_size ? masks.size(1) > 0 && masks.size(2) > 0
                            : masks.size(1) == protos.size(2) && masks.size(2) == protos.size(3)),
              op, ": masks is ", dtype_name(masks.scalar_type()), " of shape ", masks.sizes(),
              ", but numbers of shape (", overlap ? "images, " : "targets, ", protos.size(2), ", ", protos.size(3),
              ") are expected");
  TORCH_CHECK(!overlap || masks.size(0) == protos.size(0), op, ": masks has ", masks.size(0),
              " images, but protos has ", protos.size(0));
}

inline void check_v8_mask_rows(const at::Tensor& masks, const at::Tensor& targets, bool overlap, const char* op) {
  TORCH_CHECK(overlap || masks.size(0) == targets.size(0), op, ": masks has ", masks.size(0),
              " masks, but targets has ", targets.size(0), " rows; without overlap one mask a row is expected");
}

inline void check_v8_mask_loss(const at::Tensor& coefficients, const at::Tensor& protos, const at::Tensor& masks,
                               const at::Tensor& targets, const at::Tensor& settings, const at::Tensor& slot_anchor,
                               const at::Tensor& slot_row, at::IntArrayRef image_size,
                               const std::optional<at::Tensor>& num_targets, bool overlap) {
  constexpr auto op = "v8_mask_loss";
  check_v8_masks(coefficients, protos, masks, overlap, op);
  check_v8_slots(targets, slot_anchor, slot_row, coefficients, "coefficients", op);
  check_v8_settings(coefficients, "coefficients", settings, num_targets, op);
  check_v8_mask_rows(masks, targets, overlap, op);
  TORCH_CHECK(image_size.size() == 2 && image_size[0] > 0 && image_size[1] > 0, op, ": image_size is ", image_size,
              ", but height and width in pixels are expected");
}

inline void check_v8_mask_loss_backward(const at::Tensor& grad_loss, const at::Tensor& coefficients,
                                        const at::Tensor& protos, const at::Tensor& masks, const V8MaskTensors& state,
                                        bool overlap) {
  constexpr auto op = "v8_mask_loss_backward";
  const auto& [scale, positives, first, unit] = state;
  check_v8_masks(coefficients, protos, masks, overlap, op);
  const auto scalar = arithmetic_type(coefficients);
  TORCH_CHECK(grad_loss.numel() == 1 && grad_loss.scalar_type() == scalar, op, ": grad_loss is ",
              dtype_name(grad_loss.scalar_type()), " of shape ", grad_loss.sizes(), ", but one ", dtype_name(scalar),
              " is expected");
  TORCH_CHECK(positives.dim() == 2 && positives.size(1) == 4 && positives.scalar_type() == at::kLong &&
                  first.scalar_type() == at::kLong && first.numel() > protos.size(0) &&
                  first.numel() % protos.size(0) == 1 % protos.size(0) && unit.scalar_type() == scalar &&
                  unit.dim() == 2 && unit.size(0) == positives.size(0) && unit.size(1) == protos.size(1) &&
                  scale.scalar_type() == scalar && scale.numel() == 1 && positives.is_contiguous() &&
                  first.is_contiguous() && unit.is_contiguous(),
              op, ": the state is not what v8_mask_loss returned for these prototypes");
  for (const auto* tensor : {&grad_loss, &scale, &positives, &first, &unit}) {
    check_same_device(coefficients, "coefficients", *tensor, op, "the state");
  }
}

inline void check_yolov5_mask_loss(const at::Tensor& coefficients, const at::Tensor& protos, const at::Tensor& masks,
                                   const at::Tensor& targets, const at::Tensor& match_cell, at::IntArrayRef sizes,
                                   const std::optional<at::Tensor>& num_targets, bool overlap) {
  constexpr auto op = "yolov5_mask_loss";
  check_v8_masks(coefficients, protos, masks, overlap, op);
  check_v8_targets(coefficients, "coefficients", targets, 1, op);
  check_num_targets(coefficients, "coefficients", num_targets, op);
  check_same_device(coefficients, "coefficients", match_cell, op, "match_cell");
  TORCH_CHECK(match_cell.dim() == 4 && match_cell.scalar_type() == at::kLong && match_cell.is_contiguous() &&
                  match_cell.size(0) >= 1 && match_cell.size(0) <= core::kV8MaskLevels &&
                  match_cell.size(3) == targets.size(0),
              op, ": match_cell is ", dtype_name(match_cell.scalar_type()), " of shape ", match_cell.sizes(),
              ", but what yolov5_loss returned for these targets is expected");
  TORCH_CHECK(static_cast<int64_t>(sizes.size()) == 2 * match_cell.size(0), op, ": sizes has ", sizes.size(),
              " numbers, but height and width of ", match_cell.size(0), " levels are expected");
  int64_t anchors = 0;
  for (size_t i = 0; i < sizes.size(); i += 2) anchors += match_cell.size(2) * sizes[i] * sizes[i + 1];
  TORCH_CHECK(anchors == coefficients.size(2), op, ": coefficients has ", coefficients.size(2), " anchors, but sizes ",
              sizes, " have ", anchors);
  check_v8_mask_rows(masks, targets, overlap, op);
}

inline V8MaskLossResult empty_v8_mask_loss(const at::Tensor& coefficients, const at::Tensor& slot_anchor,
                                           const c10::SymInt& levels = 1) {
  const auto scalar = arithmetic_options(coefficients);
  const auto slots = slot_anchor.sym_numel();
  return {at::empty({1}, scalar),
          at::empty({1}, scalar),
          at::empty({1}, scalar),
          at::empty_symint({slots, 4}, scalar.dtype(at::kLong)),
          at::empty_symint({levels * coefficients.sym_size(0) + 1}, scalar.dtype(at::kLong)),
          at::empty_symint({slots, coefficients.sym_size(1)}, scalar)};
}

inline core::V8Coefficients v8_coefficients(const at::Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

inline core::V8Prototypes v8_prototypes(const at::Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1), tensor.stride(2),
          tensor.stride(3)};
}

// Return masks as the kernels read them: uint8 (also for bool), int32 and float32 are kept, others become float32.
inline at::Tensor v8_readable_masks(const at::Tensor& masks) {
  if (masks.scalar_type() == at::kBool) return masks.contiguous().view(at::kByte);
  const bool known =
      masks.scalar_type() == at::kByte || masks.scalar_type() == at::kInt || masks.scalar_type() == at::kFloat;
  return (known ? masks : masks.to(at::kFloat)).contiguous();
}

inline core::V8MaskProblem v8_mask_problem(const at::Tensor& coefficients, const at::Tensor& protos,
                                           const at::Tensor& masks, bool overlap, int64_t levels) {
  core::V8MaskProblem problem{};
  problem.levels = static_cast<int32_t>(levels);
  problem.dtype = core_dtype(protos.scalar_type());
  problem.coefficients = v8_coefficients(coefficients);
  problem.protos = v8_prototypes(protos);
  problem.masks = masks.const_data_ptr();
  problem.mask_type = masks.scalar_type() == at::kByte  ? core::V8MaskType::kUInt8
                      : masks.scalar_type() == at::kInt ? core::V8MaskType::kInt32
                                                        : core::V8MaskType::kFloat32;
  problem.overlap = overlap;
  problem.bs = protos.size(0);
  problem.anchors = coefficients.size(2);
  problem.height = protos.size(2);
  problem.width = protos.size(3);
  problem.channels = static_cast<int32_t>(protos.size(1));
  return problem;
}

// Set what both losses share, and run. `params` already has its settings or gain, and the slots.
template <class Backend>
void v8_run_mask_loss(core::V8MaskLossParams& params, const at::Tensor& coefficients, const at::Tensor& protos,
                      const at::Tensor& masks, const at::Tensor& targets, const at::Tensor& slot_anchor,
                      const std::optional<at::Tensor>& num_targets, bool overlap, const V8MaskLossResult& result) {
  const auto rows = targets.contiguous(), readable = v8_readable_masks(masks);
  const auto& [loss, item, scale, positives, first, unit] = result;
  const int64_t levels = (first.numel() - 1) / protos.size(0);
  params.problem = v8_mask_problem(coefficients, protos, readable, overlap, levels);
  params.targets = rows.const_data_ptr<float>();
  params.n = rows.size(0);
  params.num_targets = num_targets ? num_targets->const_data_ptr<int64_t>() : nullptr;
  params.slot_anchor = slot_anchor.const_data_ptr<int64_t>();
  params.slots = slot_anchor.numel();
  params.positives = reinterpret_cast<core::V8MaskPositive*>(positives.data_ptr<int64_t>());
  params.first = first.data_ptr<int64_t>();
  params.unit_gradients = unit.data_ptr();
  params.loss = loss.data_ptr();
  params.item = item.data_ptr();
  params.scale = scale.data_ptr();
  const auto numbers = at::empty({levels * params.n}, arithmetic_options(protos).dtype(at::kInt));
  const auto partials =
      at::empty({params.slots * core::v8_mask_parts(params.slots), 1 + protos.size(1)}, arithmetic_options(protos));
  params.numbers = numbers.mutable_data_ptr<int32_t>();
  params.partials = partials.mutable_data_ptr();
  Backend::run(params, "v8_mask_loss");
}

template <class Backend>
V8MaskLossResult v8_mask_loss(const at::Tensor& coefficients, const at::Tensor& protos, const at::Tensor& masks,
                              const at::Tensor& targets, const at::Tensor& settings, const at::Tensor& slot_anchor,
                              const at::Tensor& slot_row, V8SymInts<Backend> image_size,
                              const std::optional<at::Tensor>& num_targets, bool overlap) {
  if constexpr (Backend::kMeta) {
    const auto size = c10::asIntArrayRefSlowOpt(image_size);
    if (size && has_plain_sizes({coefficients, protos, masks, targets, slot_anchor})) {
      check_v8_mask_loss(coefficients, protos, masks, targets, settings, slot_anchor, slot_row, *size, num_targets,
                         overlap);
    }
    return empty_v8_mask_loss(coefficients, slot_anchor);
  } else {
    check_v8_mask_loss(coefficients, protos, masks, targets, settings, slot_anchor, slot_row, image_size, num_targets,
                       overlap);
    const c10::DeviceGuard guard(coefficients.device());
    const auto values = settings.contiguous();
    auto result = empty_v8_mask_loss(coefficients, slot_anchor);
    core::V8MaskLossParams params{};
    params.image_h = static_cast<float>(image_size[0]);
    params.image_w = static_cast<float>(image_size[1]);
    params.settings = values.template const_data_ptr<double>();
    params.slot_row = slot_row.template const_data_ptr<int64_t>();
    v8_run_mask_loss<Backend>(params, coefficients, protos, masks, targets, slot_anchor, num_targets, overlap, result);
    return result;
  }
}

template <class Backend>
V8MaskLossResult yolov5_mask_loss(const at::Tensor& coefficients, const at::Tensor& protos, const at::Tensor& masks,
                                  const at::Tensor& targets, const at::Tensor& match_cell, V8SymInts<Backend> sizes,
                                  const std::optional<at::Tensor>& num_targets, double box_gain, bool overlap) {
  if constexpr (Backend::kMeta) {
    const auto plain = c10::asIntArrayRefSlowOpt(sizes);
    if (plain && has_plain_sizes({coefficients, protos, masks, targets, match_cell})) {
      check_yolov5_mask_loss(coefficients, protos, masks, targets, match_cell, *plain, num_targets, overlap);
    }
    return empty_v8_mask_loss(coefficients, match_cell, match_cell.sym_size(0));
  } else {
    check_yolov5_mask_loss(coefficients, protos, masks, targets, match_cell, sizes, num_targets, overlap);
    const c10::DeviceGuard guard(coefficients.device());
    auto result = empty_v8_mask_loss(coefficients, match_cell, match_cell.size(0));
    core::V8MaskLossParams params{};
    params.gain = box_gain;
    int64_t first = 0;
    for (size_t i = 0; i < sizes.size() / 2; ++i) {
      const int64_t rows = sizes[2 * i], columns = sizes[2 * i + 1], anchors = match_cell.size(2) * rows * columns;
      params.level[i] = {first, anchors, static_cast<float>(columns), static_cast<float>(rows)};
      first += anchors;
    }
    v8_run_mask_loss<Backend>(params, coefficients, protos, masks, targets, match_cell, num_targets, overlap, result);
    return result;
  }
}

// Return gradients of coefficients and prototypes that `output_mask` asks for, in their memory format if dense.
template <class Backend>
std::tuple<at::Tensor, at::Tensor> v8_mask_loss_backward(const at::Tensor& grad_loss, const at::Tensor& coefficients,
                                                         const at::Tensor& protos, const at::Tensor& masks,
                                                         const V8MaskTensors& state, bool overlap, bool shared,
                                                         std::array<bool, 2> output_mask) {
  at::Tensor by_coefficient, by_proto;
  if (output_mask[0]) by_coefficient = empty_dense_like(coefficients, coefficients.is_non_overlapping_and_dense());
  if (output_mask[1]) by_proto = empty_dense_like(protos, protos.is_non_overlapping_and_dense());
  if constexpr (!Backend::kMeta) {
    check_v8_mask_loss_backward(grad_loss, coefficients, protos, masks, state, overlap);
    const c10::DeviceGuard guard(coefficients.device());
    const auto readable = v8_readable_masks(masks);
    core::V8MaskLossBackwardParams params{};
    params.problem =
        v8_mask_problem(coefficients, protos, readable, overlap, (state.first_positive.numel() - 1) / protos.size(0));
    params.shared = shared;
    params.slots = state.positives.size(0);
    params.positives =
        reinterpret_cast<const core::V8MaskPositive*>(state.positives.template const_data_ptr<int64_t>());
    params.first = state.first_positive.template const_data_ptr<int64_t>();
    params.unit_gradients = state.unit_gradients.const_data_ptr();
    params.scale = state.scale.const_data_ptr();
    params.grad_loss = grad_loss.const_data_ptr();
    if (output_mask[0]) params.coefficient_gradients = v8_coefficients(by_coefficient);
    if (output_mask[1]) params.proto_gradients = v8_prototypes(by_proto);
    Backend::run(params, "v8_mask_loss_backward");
  }
  return {by_coefficient, by_proto};
}

template <class Backend>
void register_v8_mask_loss(torch::Library& m) {
  m.impl("v8_mask_loss", TORCH_FN(v8_mask_loss<Backend>));
  m.impl("yolov5_mask_loss", TORCH_FN(yolov5_mask_loss<Backend>));
  m.impl("v8_mask_loss_backward", unpack<&v8_mask_loss_backward<Backend>>);
}

}  // namespace torch_fastdet
