// Check the v8 detection loss and turn its tensors into the core's parameters, for CPU, CUDA and Meta.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "core/v8_loss/v8_loss.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

// The result is loss, items, scales, slot_anchor, slot_row, slot_score and status.
using V8LossResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Hold the heads' levels. `sizes` has ny, nx of each if the heads are joined. Int is c10::SymInt while exporting.
template <typename Int = int64_t>
struct V8Levels {
  at::ArrayRef<double> strides;
  at::ArrayRef<Int> sizes;
  using Types = std::tuple<at::ArrayRef<double>, at::ArrayRef<Int>>;
};

template <class Backend>
using V8Int = std::conditional_t<Backend::kMeta, c10::SymInt, int64_t>;

template <class Backend>
using V8LevelsOn = V8Levels<V8Int<Backend>>;

// Hold every loss's arguments after its heads, in the schema's order. torch_fastdet/ops/v8_loss.py documents them.
template <typename Int>
struct V8LossArguments {
  const at::Tensor &targets, &settings;
  at::ArrayRef<double> strides;
  at::ArrayRef<Int> sizes;
  const std::optional<at::Tensor>&num_targets, &class_weights;
  int64_t reg_max, topk, topk2;
  using Types =
      std::tuple<const at::Tensor&, const at::Tensor&, at::ArrayRef<double>, at::ArrayRef<Int>,
                 const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, int64_t, int64_t, int64_t>;

  V8Levels<Int> levels() const { return {strides, sizes}; }
};

struct V8LossTensors {
  const at::Tensor &scales, &slot_anchor, &slot_row, &slot_score;
  using Types = std::tuple<const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&>;
};

// Return whether the heads are boxes and scores (bs, channels, anchors) of all levels, not one tensor for each level.
inline bool v8_is_joined(at::TensorList heads) {
  return heads.size() == 2 && heads[0].dim() == 3;
}

// Describe a tensor's layout as (bs, channels, anchors), and whether it is dense in it.
struct V8Lies {
  core::V8Layout layout;
  bool dense;
};

template <typename Int>
V8Lies v8_lies(const Int& channels, const Int& ny, const Int& nx, const Int& batch, const Int& stride_b,
               const Int& stride_c, const Int& stride_y, const Int& stride_x) {
  const auto fits = [&](const Int& by_b, const Int& by_c, const Int& by_y, const Int& by_x) {
    const Int one(1);
    return (batch == one || stride_b == by_b) && (channels == one || stride_c == by_c) &&
           (ny == one || stride_y == by_y) && (nx == one || stride_x == by_x);
  };
  const Int all = channels * ny * nx;
  if (fits(all, ny * nx, nx, Int(1))) return {core::V8Layout::kPlanes, true};
  if (fits(all, Int(1), nx * channels, channels)) return {core::V8Layout::kRows, true};
  return {core::V8Layout::kPlanes, false};
}

inline V8Lies v8_lies(const at::Tensor& head) {
  if (head.dim() == 3) {
    return v8_lies<c10::SymInt>(head.sym_size(1), 1, head.sym_size(2), head.sym_size(0), head.sym_stride(0),
                                head.sym_stride(1), 0, head.sym_stride(2));
  }
  return v8_lies<c10::SymInt>(head.sym_size(1), head.sym_size(2), head.sym_size(3), head.sym_size(0),
                              head.sym_stride(0), head.sym_stride(1), head.sym_stride(2), head.sym_stride(3));
}

inline void check_v8_heads(at::TensorList heads, const V8Levels<>& of_levels, int64_t reg_max, const char* op) {
  const auto& [strides, sizes] = of_levels;
  const auto levels = static_cast<int64_t>(strides.size());
  TORCH_CHECK_VALUE(levels >= 1 && levels <= core::kV8MaxLevels, op, ": strides has ", levels, " levels, but 1 to ",
                    core::kV8MaxLevels, " are expected");
  for (const double stride : strides) {
    TORCH_CHECK_VALUE(stride > 0, op, ": strides has ", stride, ", but numbers above 0 are expected");
  }
  TORCH_CHECK(!heads.empty(), op, ": heads is empty, but one tensor a level, or boxes and scores, are expected");
  TORCH_CHECK_VALUE(reg_max >= 1 && reg_max <= 1024, op, ": reg_max is ", reg_max, ", but 1 to 1024 is expected");
  check_heads(heads, op);
  const int64_t boxes = 4 * reg_max;
  if (v8_is_joined(heads)) {
    TORCH_CHECK_VALUE(sizes.size() == 2 * strides.size(), op, ": sizes has ", sizes.size(), " numbers, but ",
                      2 * levels, " are expected for ", levels, " levels: height and width of each");
    int64_t anchors = 0;
    for (int64_t level = 0; level < levels; ++level) {
      const int64_t ny = sizes[2 * level], nx = sizes[2 * level + 1];
      TORCH_CHECK_VALUE(ny > 0 && nx > 0, op, ": sizes has ", ny, " x ", nx, ", but an empty level has no loss");
      anchors += ny * nx;
    }
    TORCH_CHECK(heads[1].dim() == 3 && heads[0].size(1) == boxes && heads[0].size(2) == anchors &&
                    heads[1].size(2) == anchors && heads[1].size(0) == heads[0].size(0) && heads[1].size(1) > 0,
                op, ": heads have shapes ", heads[0].sizes(), " and ", heads[1].sizes(), ", but (bs, ", boxes, ", ",
                anchors, ") and (bs, classes, ", anchors, ") are expected");
    TORCH_CHECK(heads[0].size(0) > 0, op, ": heads have no images");
    return;
  }
  TORCH_CHECK(static_cast<int64_t>(heads.size()) == levels, op, ": ", heads.size(), " heads came for ", levels,
              " strides, but one (bs, 4 * reg_max + classes, ny, nx) a level, or boxes and scores of three dimensions, "
              "are expected");
  for (size_t i = 0; i < heads.size(); ++i) {
    TORCH_CHECK(heads[i].dim() == 4 && heads[i].size(1) == heads[0].size(1) && heads[i].size(0) == heads[0].size(0) &&
                    heads[i].size(1) > boxes,
                op, ": heads[", i, "] has shape ", heads[i].sizes(), ", but (bs, ", boxes,
                " + classes, ny, nx) with the batch and the classes of heads[0] is expected");
    TORCH_CHECK(heads[i].numel() > 0, op, ": heads[", i, "] has shape ", heads[i].sizes(),
                ", but an empty head has no loss");
  }
}

inline int64_t v8_classes(at::TensorList heads, int64_t reg_max) {
  return v8_is_joined(heads) ? heads[1].size(1) : heads[0].size(1) - 4 * reg_max;
}

inline void check_v8_class_weights(const at::Tensor& head, const std::optional<at::Tensor>& class_weights,
                                   int64_t classes, const char* op) {
  if (!class_weights) return;
  check_same_device(head, "the heads", *class_weights, op, "class_weights");
  TORCH_CHECK(class_weights->numel() == classes && is_supported_float(class_weights->scalar_type()), op,
              ": class_weights is ", dtype_name(class_weights->scalar_type()), " of shape ", class_weights->sizes(),
              ", but ", classes, " numbers are expected, one a class");
}

inline void check_v8_targets(const at::Tensor& first, const char* first_name, const at::Tensor& targets, int64_t topk,
                             const char* op, int64_t columns = 6) {
  TORCH_CHECK(targets.dim() == 2 && targets.size(1) == columns, op, ": targets has shape ", targets.sizes(),
              ", but (n, ", columns, ") is expected: image, class, x, y, w, h", columns == 7 ? ", angle" : "");
  TORCH_CHECK(targets.scalar_type() == at::kFloat, op, ": targets is ", dtype_name(targets.scalar_type()),
              ", but float32 is expected");
  check_same_device(first, first_name, targets, op, "targets");
  TORCH_CHECK(targets.size(0) <= (int64_t{1} << 30) / topk, op, ": targets has ", targets.size(0),
              " rows, more than slots can be numbered for");
}

inline void check_v8_settings(const at::Tensor& first, const char* first_name, const at::Tensor& settings,
                              const std::optional<at::Tensor>& num_targets, const char* op,
                              int64_t count = core::kV8Settings) {
  TORCH_CHECK(settings.scalar_type() == at::kDouble && settings.numel() == count, op, ": settings is ",
              dtype_name(settings.scalar_type()), " of shape ", settings.sizes(), ", but ", count,
              " float64 are expected: box, cls and dfl gain, weight, alpha, beta, eps, least side, short side",
              count > core::kV8Settings ? ", angle gain" : "");
  check_same_device(first, first_name, settings, op, "settings");
  check_num_targets(first, first_name, num_targets, op);
}

inline void check_v8_slots(const at::Tensor& targets, const at::Tensor& slot_anchor, const at::Tensor& slot_row,
                           const at::Tensor& first, const char* first_name, const char* op) {
  const bool has_slots = slot_anchor.dim() == 2 && slot_anchor.size(1) > 0;
  check_v8_targets(first, first_name, targets, has_slots ? slot_anchor.size(1) : 1, op);
  TORCH_CHECK(has_slots && slot_anchor.size(0) == targets.size(0) && slot_anchor.scalar_type() == at::kLong &&
                  slot_row.scalar_type() == at::kLong && slot_row.sizes() == slot_anchor.sizes() &&
                  slot_anchor.is_contiguous() && slot_row.is_contiguous(),
              op, ": slot_anchor has shape ", slot_anchor.sizes(), " and slot_row ", slot_row.sizes(),
              ", but what v8_loss returned for these targets is expected");
  check_same_device(first, first_name, slot_anchor, op, "slot_anchor");
  check_same_device(first, first_name, slot_row, op, "slot_row");
}

// Check the arguments after the heads, of which `first` is one and whose levels are plain.
template <typename Int>
void check_v8_arguments(const at::Tensor& first, const char* first_name, int64_t classes, const V8LossArguments<Int>& a,
                        const char* op, int64_t columns = 6, int64_t settings = core::kV8Settings) {
  TORCH_CHECK_VALUE(a.topk >= 1 && a.topk2 >= 1, op, ": topk is ", a.topk, " and topk2 is ", a.topk2,
                    ", but numbers above 0 are expected");
  check_v8_targets(first, first_name, a.targets, a.topk, op, columns);
  check_v8_settings(first, first_name, a.settings, a.num_targets, op, settings);
  check_v8_class_weights(first, a.class_weights, classes, op);
}

template <typename Int>
void check_v8_loss(at::TensorList heads, const V8Levels<>& levels, const V8LossArguments<Int>& a, const char* op) {
  check_v8_heads(heads, levels, a.reg_max, op);
  check_v8_arguments(heads[0], "heads[0]", v8_classes(heads, a.reg_max), a, op);
}

// Call check(levels) unless sizes are symbolic on Meta: a message cannot hold them, and the kernel checks them later.
template <class Backend, typename Check>
void check_plain(const V8LevelsOn<Backend>& levels, std::initializer_list<at::Tensor> tensors, at::TensorList heads,
                 const Check& check) {
  if constexpr (Backend::kMeta) {
    const auto sizes = c10::asIntArrayRefSlowOpt(levels.sizes);
    if (sizes && has_plain_sizes(tensors, heads)) check(V8Levels<>{levels.strides, *sizes});
  } else {
    check(levels);
  }
}

// Check a forward pass's results, and the gradient of its loss, which has `parts` parts.
inline void check_v8_state(const at::Tensor& grad_loss, const at::Tensor& first, const char* first_name,
                           const at::Tensor& targets, const V8LossTensors& state, const char* op, int64_t parts,
                           int64_t columns) {
  const auto& [scales, slot_anchor, slot_row, slot_score] = state;
  TORCH_CHECK(slot_anchor.dim() == 2 && slot_anchor.size(1) > 0, op, ": slot_anchor has shape ", slot_anchor.sizes(),
              ", but what the forward pass returned is expected");
  check_v8_targets(first, first_name, targets, slot_anchor.size(1), op, columns);
  const auto scalar = arithmetic_type(first);
  TORCH_CHECK(grad_loss.dim() == 1 && grad_loss.size(0) == parts && grad_loss.scalar_type() == scalar, op,
              ": grad_loss is ", dtype_name(grad_loss.scalar_type()), " of shape ", grad_loss.sizes(), ", but ", parts,
              " ", dtype_name(scalar), " are expected");
  TORCH_CHECK(slot_anchor.size(0) == targets.size(0) && slot_anchor.scalar_type() == at::kLong &&
                  slot_row.scalar_type() == at::kLong && slot_row.sizes() == slot_anchor.sizes() &&
                  slot_score.scalar_type() == scalar && slot_score.sizes() == slot_anchor.sizes() &&
                  scales.scalar_type() == scalar && scales.numel() == parts,
              op, ": the state is not what the forward pass returned for these heads and targets");
  for (const auto* tensor : {&scales, &slot_anchor, &slot_row, &slot_score}) {
    TORCH_CHECK(tensor->is_contiguous(), op,
                ": a tensor of the state is not contiguous, as the forward pass returned it");
  }
  for (const auto* tensor : {&grad_loss, &scales, &slot_anchor, &slot_row, &slot_score}) {
    check_same_device(first, first_name, *tensor, op, "the state");
  }
}

inline void check_v8_loss_backward(const at::Tensor& grad_loss, at::TensorList heads, const at::Tensor& targets,
                                   const V8LossTensors& state, const V8Levels<>& levels,
                                   const std::optional<at::Tensor>& class_weights, int64_t reg_max) {
  constexpr auto op = "v8_loss_backward";
  check_v8_heads(heads, levels, reg_max, op);
  check_v8_state(grad_loss, heads[0], "heads[0]", targets, state, op, 3, 6);
  check_v8_class_weights(heads[0], class_weights, v8_classes(heads, reg_max), op);
}

inline V8LossResult empty_v8_loss(const at::Tensor& head, const at::Tensor& targets, int64_t topk, int64_t parts) {
  const auto scalar = arithmetic_options(head);
  const auto integer = scalar.dtype(at::kLong);
  const auto n = targets.sym_size(0);
  return {at::empty({parts}, scalar),
          at::empty({parts}, scalar),
          at::empty({parts}, scalar),
          at::empty_symint({n, topk}, integer),
          at::empty_symint({n, topk}, integer),
          at::empty_symint({n, topk}, scalar),
          at::empty({core::kV8StatusSize}, integer)};
}

// Return empty gradients in the heads' own dtype and, if a head is dense in a known layout, in its layout.
inline std::vector<at::Tensor> empty_v8_gradients(at::TensorList heads) {
  std::vector<at::Tensor> gradients;
  for (const auto& head : heads) gradients.push_back(empty_dense_like(head, v8_lies(head).dense));
  return gradients;
}

// Set where the anchors of each level lie, and the size of the images. `levels` must have sizes.
inline void v8_set_levels(core::V8Heads& heads, const V8Levels<>& levels) {
  heads.num_levels = static_cast<int32_t>(levels.strides.size());
  heads.anchors = 0;
  for (int32_t i = 0; i < heads.num_levels; ++i) {
    core::V8Level& level = heads.levels[i];
    level.ny = levels.sizes[2 * i];
    level.nx = levels.sizes[2 * i + 1];
    level.first = heads.anchors;
    level.stride = static_cast<float>(levels.strides[i]);
    heads.anchors += level.ny * level.nx;
  }
  heads.image_w = static_cast<float>(heads.levels[0].nx) * heads.levels[0].stride;
  heads.image_h = static_cast<float>(heads.levels[0].ny) * heads.levels[0].stride;
}

// `gradients` is empty in the forward pass.
inline core::V8Heads v8_heads(at::TensorList heads, at::TensorList gradients, const V8Levels<>& levels,
                              int64_t reg_max) {
  core::V8Heads result{};
  const bool joined = v8_is_joined(heads);
  result.dtype = core_dtype(heads[0].scalar_type());
  result.num_tensors = static_cast<int32_t>(heads.size());
  result.reg_max = static_cast<int32_t>(reg_max);
  result.nc = static_cast<int32_t>(v8_classes(heads, reg_max));
  result.bs = heads[0].size(0);
  const auto boxes = static_cast<int32_t>(4 * reg_max);
  for (int32_t i = 0; i < result.num_tensors; ++i) {
    const at::Tensor& head = heads[i];
    core::V8Tensor& tensor = result.tensors[i];
    const auto [layout, dense] = v8_lies(head);
    tensor.logits = head.const_data_ptr();
    tensor.gradient = gradients.empty() ? nullptr : gradients[i].mutable_data_ptr();
    tensor.stride_b = head.stride(0);
    tensor.stride_c = head.stride(1);
    tensor.stride_y = head.dim() == 3 ? 0 : head.stride(2);
    tensor.stride_x = head.dim() == 3 ? head.stride(2) : head.stride(3);
    tensor.width = head.size(-1);
    tensor.anchors = head.dim() == 3 ? head.size(2) : head.size(2) * head.size(3);
    tensor.channels = static_cast<int32_t>(head.size(1));
    tensor.box_channels = joined && i == 1 ? 0 : boxes;
    tensor.layout = layout;
    tensor.dense = dense;
  }
  std::vector<int64_t> own;  // levels that are tensors of their own
  if (!joined) {
    for (const auto& head : heads) own.insert(own.end(), {head.size(2), head.size(3)});
  }
  v8_set_levels(result, {levels.strides, joined ? levels.sizes : at::IntArrayRef(own)});
  for (int32_t i = 0; i < result.num_levels; ++i) {
    core::V8Level& level = result.levels[i];
    level.boxes = joined ? 0 : i;
    level.classes = joined ? 1 : i;
    level.first_in_tensor = joined ? level.first : 0;
  }
  return result;
}

}  // namespace torch_fastdet
