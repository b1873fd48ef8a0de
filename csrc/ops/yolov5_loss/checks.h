// Check the YOLOv5 loss and turn its tensors into the core's parameters, for CPU, CUDA and Meta.
#pragma once

#include <array>
#include <type_traits>
#include <vector>

#include "core/yolov5_loss/yolov5_loss.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

// Hold the loss's options as the schema lists them. torch_fastdet/ops/yolov5_loss.py documents them.
struct Yolov5LossOptions {
  double box_gain, obj_gain, cls_gain, cls_pw, obj_pw, label_smoothing, fl_gamma, anchor_t, gr;
  bool sort_obj_iou;
  using Types = std::tuple<double, double, double, double, double, double, double, double, double, bool>;
};

// Hold the options that the backward pass reads too.
struct Yolov5ClassOptions {
  double cls_pw, label_smoothing, fl_gamma;
  using Types = std::tuple<double, double, double>;
};

struct Yolov5LossTensors {
  const at::Tensor &levels, &owner, &match_cell, &match_values, &object_gradient;
  using Types =
      std::tuple<const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&>;
};

// View a head of either form as (bs, na, ny, nx, no). Int is int64_t, or c10::SymInt while exporting.
template <typename Int = int64_t>
struct Yolov5HeadView {
  std::array<Int, 5> sizes, strides;
};

template <typename Int = int64_t>
Yolov5HeadView<Int> view_yolov5_head(const at::Tensor& head, Int na) {
  const auto view = [&](at::ArrayRef<Int> size, at::ArrayRef<Int> stride) -> Yolov5HeadView<Int> {
    if (size.size() == 5) {
      return {{size[0], size[1], size[2], size[3], size[4]}, {stride[0], stride[1], stride[2], stride[3], stride[4]}};
    }
    const Int no = size[1] / na;
    return {{size[0], na, size[2], size[3], no}, {stride[0], stride[1] * no, stride[2], stride[3], stride[1]}};
  };
  if constexpr (std::is_same_v<Int, int64_t>) {
    return view(head.sizes(), head.strides());
  } else {
    return view(head.sym_sizes(), head.sym_strides());
  }
}

// Return the strides of a dense (bs, na, ny, nx, no) head in each layout.
template <typename Int>
std::array<Int, 5> yolov5_layout_strides(core::Yolov5Layout layout, const std::array<Int, 5>& sizes) {
  const auto& [bs, na, ny, nx, no] = sizes;
  switch (layout) {
    case core::Yolov5Layout::kCellRows:
      return {ny * nx * na * no, no, nx * na * no, na * no, Int(1)};
    case core::Yolov5Layout::kPlanes:
      return {na * no * ny * nx, no * ny * nx, nx, Int(1), ny * nx};
    default:
      return {na * ny * nx * no, ny * nx * no, nx * no, no, Int(1)};
  }
}

struct Yolov5HeadLayout {
  core::Yolov5Layout layout;  // of the gradient
  bool dense;                 // the logits have it too
};

template <typename Int>
Yolov5HeadLayout yolov5_head_layout(const Yolov5HeadView<Int>& view, bool five_dimensional) {
  using core::Yolov5Layout;
  const auto lies = [&](Yolov5Layout layout) {
    const auto strides = yolov5_layout_strides(layout, view.sizes);
    for (int i = 0; i < 5; ++i) {
      if (view.sizes[i] != Int(1) && view.strides[i] != strides[i]) return false;
    }
    return true;
  };
  // A four-dimensional gradient cannot have the layout of anchor rows.
  if (five_dimensional && lies(Yolov5Layout::kAnchorRows)) return {Yolov5Layout::kAnchorRows, true};
  if (lies(Yolov5Layout::kPlanes)) return {Yolov5Layout::kPlanes, true};
  if (lies(Yolov5Layout::kCellRows)) return {Yolov5Layout::kCellRows, true};
  // These are the first channels of a wider channels_last tensor, whose rows are longer. Their gradient has no gaps.
  const auto& [b, a, y, x, o] = view.strides;
  const auto& sizes = view.sizes;
  if (o == Int(1) && a == sizes[4] && x > a * sizes[1] && y == x * sizes[3] && b == y * sizes[2]) {
    return {Yolov5Layout::kCellRows, false};
  }
  return {five_dimensional ? Yolov5Layout::kAnchorRows : Yolov5Layout::kPlanes, false};
}

inline void check_yolov5_heads(at::TensorList heads, int64_t na, const char* op) {
  check_heads(heads, op);
  for (size_t i = 0; i < heads.size(); ++i) {
    const auto& head = heads[i];
    TORCH_CHECK(head.dim() == 5 || head.dim() == 4, op, ": heads[", i, "] has shape ", head.sizes(),
                ", but (bs, na, ny, nx, no) or (bs, na*no, ny, nx) is expected");
    if (head.dim() == 5) {
      TORCH_CHECK(head.size(1) == na, op, ": heads[", i, "] has ", head.size(1), " anchors in shape ", head.sizes(),
                  ", but anchors has ", na, " a level");
    } else {
      TORCH_CHECK(head.size(1) % na == 0, op, ": heads[", i, "] has ", head.size(1),
                  " channels, but a multiple of the ", na, " anchors a level is expected");
    }
    const int64_t no = view_yolov5_head(head, na).sizes[4], first_no = view_yolov5_head(heads[0], na).sizes[4];
    TORCH_CHECK(head.size(0) == heads[0].size(0) && no == first_no, op, ": heads[", i, "] has batch ", head.size(0),
                " and ", no, " outputs an anchor, but heads[0] has ", heads[0].size(0), " and ", first_no);
    TORCH_CHECK(no >= 6, op, ": heads[", i, "] has ", no,
                " outputs an anchor, but at least 6 are expected: x, y, w, h, objectness and one class");
    TORCH_CHECK(head.numel() > 0, op, ": heads[", i, "] has shape ", head.sizes(), ", but an empty head has no loss");
  }
}

inline void check_yolov5_loss(at::TensorList heads, const at::Tensor& targets, const at::Tensor& anchors,
                              const at::Tensor& balance, const std::optional<at::Tensor>& num_targets,
                              const Yolov5LossOptions& options) {
  constexpr auto op = "yolov5_loss";
  TORCH_CHECK(!heads.empty() && heads.size() <= core::kYolov5MaxLevels, op, ": ", heads.size(),
              " heads came, but 1 to ", core::kYolov5MaxLevels, " are expected");
  TORCH_CHECK(anchors.dim() == 3 && anchors.size(0) == static_cast<int64_t>(heads.size()) && anchors.size(1) > 0 &&
                  anchors.size(2) == 2,
              op, ": anchors has shape ", anchors.sizes(), ", but (", heads.size(), ", na, 2) is expected for ",
              heads.size(), " heads");
  check_yolov5_heads(heads, anchors.size(1), op);
  TORCH_CHECK(targets.dim() == 2 && targets.size(1) == 6, op, ": targets has shape ", targets.sizes(),
              ", but (nt, 6) is expected: image, class, x, y, w, h");
  TORCH_CHECK(targets.size(0) * anchors.size(1) * core::kYolov5CellOffsets < int64_t{0xffffffff}, op, ": targets has ",
              targets.size(0), " rows, more than slots can be numbered for");
  TORCH_CHECK(targets.scalar_type() == at::kFloat, op, ": targets is ", dtype_name(targets.scalar_type()),
              ", but float32 is expected");
  TORCH_CHECK(anchors.scalar_type() == at::kFloat, op, ": anchors is ", dtype_name(anchors.scalar_type()),
              ", but float32 is expected");
  TORCH_CHECK(balance.scalar_type() == at::kDouble && balance.dim() == 1 && balance.size(0) >= anchors.size(0), op,
              ": balance is ", dtype_name(balance.scalar_type()), " of shape ", balance.sizes(),
              ", but float64 of shape (", heads.size(), ") or longer is expected");
  check_same_device(heads[0], "heads[0]", targets, op, "targets");
  check_same_device(heads[0], "heads[0]", anchors, op, "anchors");
  check_same_device(heads[0], "heads[0]", balance, op, "balance");
  check_num_targets(heads[0], "heads[0]", num_targets, op);
  TORCH_CHECK_VALUE(options.label_smoothing >= 0 && options.label_smoothing <= 1, op, ": label_smoothing is ",
                    options.label_smoothing, ", but 0 to 1 is expected");
  TORCH_CHECK_VALUE(options.anchor_t > 0, op, ": anchor_t is ", options.anchor_t, ", but a number above 0 is expected");
}

inline int64_t yolov5_cells(at::TensorList heads, int64_t na) {
  int64_t cells = 0;
  for (const auto& head : heads) cells += head.numel() / view_yolov5_head(head, na).sizes[4];
  return cells;
}

// The result is the loss, its items and what the backward pass reads.
using Yolov5LossResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline Yolov5LossResult empty_yolov5_loss(at::TensorList heads, const at::Tensor& targets, const at::Tensor& anchors) {
  const auto scalar = arithmetic_options(heads[0]);
  const auto integer = scalar.dtype(at::kLong);
  const auto nl = anchors.sym_size(0), na = anchors.sym_size(1), nt = targets.sym_size(0);
  constexpr int64_t kOffsets = core::kYolov5CellOffsets;
  c10::SymInt cells = 0;
  for (const auto& head : heads) {
    cells += head.dim() == 5 ? head.sym_size(0) * head.sym_size(1) * head.sym_size(2) * head.sym_size(3)
                             : head.sym_size(0) * na * head.sym_size(2) * head.sym_size(3);
  }
  return {at::empty({1}, scalar),
          at::empty({3}, scalar),
          at::empty_symint({nl, 4}, scalar),
          at::empty_symint({cells + core::kYolov5StatusSize}, integer),
          at::empty_symint({nl, kOffsets, na, nt}, integer),
          at::empty_symint({nl, kOffsets, na, nt, 5}, scalar),
          at::empty_symint({cells}, scalar)};
}

// Return empty gradients in the heads' own dtype, in the layout of yolov5_head_layout.
template <typename Int>
std::vector<at::Tensor> empty_yolov5_gradients(at::TensorList heads, Int na) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(heads.size());
  for (const auto& head : heads) {
    const auto view = view_yolov5_head<Int>(head, na);
    const auto [layout, dense] = yolov5_head_layout(view, head.dim() == 5);
    if (dense || layout != core::Yolov5Layout::kCellRows) {
      gradients.push_back(empty_dense_like(head, dense));
    } else if (head.dim() == 4) {
      gradients.push_back(at::empty_like(head, {}, at::MemoryFormat::ChannelsLast));
    } else {
      const auto& [bs, anchors, ny, nx, no] = view.sizes;
      gradients.push_back(at::empty_symint({bs, ny, nx, anchors, no}, head.options()).permute({0, 3, 1, 2, 4}));
    }
  }
  return gradients;
}

inline core::Yolov5LossState yolov5_loss_state(const Yolov5LossTensors& t) {
  return {reinterpret_cast<uint64_t*>(t.owner.data_ptr<int64_t>()), t.match_cell.data_ptr<int64_t>(),
          t.match_values.data_ptr(), t.object_gradient.data_ptr(), t.levels.data_ptr()};
}

// Set what forward and backward parameters share. `gradients` is empty in the forward pass; targets is contiguous.
template <typename Params>
void fill_yolov5_loss_params(Params& params, at::TensorList heads, at::TensorList gradients, int64_t na,
                             const at::Tensor& targets, const Yolov5ClassOptions& options) {
  params.dtype = core_dtype(heads[0].scalar_type());
  params.nl = static_cast<int>(heads.size());
  params.na = static_cast<int>(na);
  int64_t first_cell = 0;
  for (size_t i = 0; i < heads.size(); ++i) {
    const auto view = view_yolov5_head(heads[i], na);
    const auto& [sizes, strides] = view;
    const auto [layout, dense] = yolov5_head_layout(view, heads[i].dim() == 5);
    void* gradient = gradients.empty() ? nullptr : gradients[i].data_ptr();
    const int64_t cells = sizes[0] * na * sizes[2] * sizes[3];
    params.heads[i] = {heads[i].const_data_ptr(),
                       gradient,
                       strides[0],
                       strides[1],
                       strides[2],
                       strides[3],
                       strides[4],
                       sizes[2],
                       sizes[3],
                       first_cell,
                       cells,
                       layout,
                       dense};
    first_cell += cells;
    params.bs = sizes[0];
    params.no = static_cast<int>(sizes[4]);
    params.nc = params.no - 5;
  }
  params.targets = targets.const_data_ptr<float>();
  params.nt = targets.size(0);
  params.cls_pw = options.cls_pw;
  params.positive = 1.0 - 0.5 * options.label_smoothing;
  params.negative = 0.5 * options.label_smoothing;
  params.fl_gamma = options.fl_gamma;
}

// Return the forward parameters without the scratch that only CUDA needs. Every tensor must be contiguous.
inline core::Yolov5LossParams yolov5_loss_params(at::TensorList heads, const at::Tensor& targets,
                                                 const at::Tensor& anchors, const at::Tensor& balance,
                                                 const std::optional<at::Tensor>& num_targets,
                                                 const Yolov5LossOptions& options, const Yolov5LossResult& result) {
  core::Yolov5LossParams params{};
  fill_yolov5_loss_params(params, heads, {}, anchors.size(1), targets,
                          {options.cls_pw, options.label_smoothing, options.fl_gamma});
  params.obj_pw = options.obj_pw;
  params.num_targets = num_targets ? num_targets->const_data_ptr<int64_t>() : nullptr;
  params.anchors = anchors.const_data_ptr<float>();
  params.balance = balance.const_data_ptr<double>();
  params.box = options.box_gain;
  params.obj = options.obj_gain;
  params.cls = options.cls_gain;
  params.gr = options.gr;
  params.anchor_t = static_cast<float>(options.anchor_t);
  params.sort_obj_iou = options.sort_obj_iou;
  const auto& [loss, items, levels, owner, match_cell, match_values, object_gradient] = result;
  params.state = yolov5_loss_state({levels, owner, match_cell, match_values, object_gradient});
  params.loss = loss.data_ptr();
  params.items = items.data_ptr();
  params.status = owner.data_ptr<int64_t>() + (owner.numel() - core::kYolov5StatusSize);
  return params;
}

inline core::Yolov5LossBackwardParams yolov5_loss_backward_params(const at::Tensor& grad_loss, at::TensorList heads,
                                                                  at::TensorList gradients, const at::Tensor& targets,
                                                                  const Yolov5LossTensors& state,
                                                                  const Yolov5ClassOptions& options) {
  core::Yolov5LossBackwardParams params{};
  fill_yolov5_loss_params(params, heads, gradients, state.match_cell.size(2), targets, options);
  params.state = yolov5_loss_state(state);
  params.grad_loss = grad_loss.const_data_ptr();
  return params;
}

inline void check_yolov5_loss_backward(const at::Tensor& grad_loss, at::TensorList heads, const at::Tensor& targets,
                                       const Yolov5LossTensors& state) {
  constexpr auto op = "yolov5_loss_backward";
  const auto& [levels, owner, match_cell, match_values, object_gradient] = state;
  TORCH_CHECK(match_cell.dim() == 4 && match_cell.size(0) == static_cast<int64_t>(heads.size()) &&
                  match_cell.size(1) == core::kYolov5CellOffsets && match_cell.size(3) == targets.size(0) &&
                  targets.dim() == 2 && targets.size(1) == 6,
              op, ": match_cell has shape ", match_cell.sizes(), " for ", heads.size(), " heads and targets of shape ",
              targets.sizes(), ", but what yolov5_loss returned for them is expected");
  const int64_t na = match_cell.size(2);
  TORCH_CHECK(na > 0, op, ": match_cell has no anchors");
  check_yolov5_heads(heads, na, op);
  const auto scalar = arithmetic_type(heads[0]);
  TORCH_CHECK(grad_loss.numel() == 1 && grad_loss.scalar_type() == scalar, op, ": grad_loss is ",
              dtype_name(grad_loss.scalar_type()), " of shape ", grad_loss.sizes(), ", but one ", dtype_name(scalar),
              " is expected");
  TORCH_CHECK(targets.scalar_type() == at::kFloat && owner.scalar_type() == at::kLong &&
                  match_cell.scalar_type() == at::kLong && match_values.scalar_type() == scalar &&
                  object_gradient.scalar_type() == scalar && levels.scalar_type() == scalar &&
                  object_gradient.numel() == yolov5_cells(heads, na) &&
                  owner.numel() == object_gradient.numel() + core::kYolov5StatusSize &&
                  match_values.numel() == 5 * match_cell.numel() &&
                  levels.numel() == 4 * static_cast<int64_t>(heads.size()),
              op, ": the state is not what yolov5_loss returned for these heads and targets");
  for (const auto* tensor : {&grad_loss, &targets, &levels, &owner, &match_cell, &match_values, &object_gradient}) {
    check_same_device(heads[0], "heads[0]", *tensor, op, "the state");
    TORCH_CHECK(tensor == &targets || tensor->is_contiguous(), op,
                ": a tensor of the state is not contiguous, as yolov5_loss returned it");
  }
}

}  // namespace torch_fastdet
