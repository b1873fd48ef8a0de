// multi_tensor operators, the part that is the same on every device: check, make rows, say what is to be done, run.
#include "ops/multi_tensor/run.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "core/multi_tensor/multi_tensor_plan.h"
#include "ops/multi_tensor/checks.h"
#include "ops/multi_tensor/library.h"

namespace torch_fastdet::multi_tensor {
namespace {

bool lie_alike(const at::Tensor& tensor, const at::Tensor& first) {
  return tensor.is_contiguous() ? first.is_contiguous() : tensor.strides().equals(first.strides());
}

void set_found_inf_and_scale(core::UpdateParams& params, const List& list, const std::optional<at::Tensor>& grad_scale,
                             const std::optional<at::Tensor>& found_inf, const char* op) {
  params.grad_scale = float_pointer(grad_scale, list, op, "grad_scale");
  params.found_inf = float_pointer(found_inf, list, op, "found_inf");
  params.write_grads = grad_scale.has_value();
}

void bump_versions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) bump_version(tensor);
}

at::Tensor empty_norm(const List& list) {
  const auto dtype = list.any_float64 ? at::kDouble : at::kFloat;
  return at::empty({}, at::TensorOptions().device(list.device).dtype(dtype));
}

}  // namespace

void List::add(const char* op, const at::Tensor* const tensors[core::kSlots], const bool written[core::kSlots],
               int32_t group, const std::function<std::string(int)>& name) {
  const at::Tensor* first = nullptr;
  int first_slot = 0;
  core::Row row{};
  row.group = group;
  row.layout = -1;
  bool alike = true;
  for (int slot = 0; slot < core::kSlots; ++slot) {
    const at::Tensor* tensor = tensors[slot];
    if (!tensor || !tensor->defined()) continue;
    if (meta) {
      check_strided(*tensor, op, name(slot).c_str());
      check_float(*tensor, op, name(slot).c_str());
      check_device(*tensor, device, op, name(slot), "the first tensor");
      any_float64 = any_float64 || tensor->scalar_type() == at::kDouble;
      if (first && !tensor->sym_sizes().equals(first->sym_sizes())) {
        check_beside(*tensor, *first, op, name(slot), name(first_slot));
      }
      if (!first) {
        first = tensor;
        first_slot = slot;
      }
      continue;
    }
    if (C10_UNLIKELY(tensor->layout() != at::kStrided || !is_supported_float(tensor->scalar_type()) ||
                     tensor->is_neg() || !tensor->is_contiguous() || wraps_others(*tensor))) {
      check_tensor(*tensor, written[slot], op, name(slot));
    }
    if (C10_UNLIKELY(tensor->device() != device)) {
      if (rows.empty() && !first) {
        device = tensor->device();
      } else {
        check_device(*tensor, device, op, name(slot), "the first tensor");
      }
    }
    if (!first) {
      first = tensor;
      first_slot = slot;
      row.numel = tensor->numel();
      alike = tensor->is_contiguous() || tensor->is_non_overlapping_and_dense();
    } else {
      if (C10_UNLIKELY(!tensor->sizes().equals(first->sizes()))) {
        check_beside(*tensor, *first, op, name(slot), name(first_slot));
      }
      alike = alike && lie_alike(*tensor, *first);
    }
    const auto dtype = core_dtype(tensor->scalar_type());
    row.dtype[slot] = static_cast<uint8_t>(dtype);
    float32_only = float32_only && dtype == core::DType::kFloat32;
    any_float64 = any_float64 || dtype == core::DType::kFloat64;
    if (row.numel == 0) continue;
    row.data[slot] = written[slot] ? tensor->mutable_data_ptr() : const_cast<void*>(tensor->const_data_ptr());
  }
  if (first && !alike) {
    core::Layout layout;
    const int64_t* strides[core::kSlots] = {};
    for (int slot = 0; slot < core::kSlots; ++slot) {
      if (tensors[slot] && tensors[slot]->defined()) strides[slot] = tensors[slot]->strides().data();
    }
    TORCH_CHECK(core::merge_dims(layout, first->dim(), first->sizes().data(), strides), op, ": ", name(first_slot),
                " of shape ", first->sizes(), " and the tensors beside it lie in memory in more than ", core::kMaxDims,
                " dimensions, but at most that many are wanted; make them contiguous");
    row.layout = static_cast<int32_t>(layouts.size());
    layouts.push_back(layout);
    float32_only = false;
  }
  rows.push_back(row);
}

List make_list(const char* op, std::initializer_list<Operand> operands, int32_t group, bool meta) {
  const Operand& first = *operands.begin();
  for (const Operand& operand : operands) {
    check_length(op, operand.name, operand.tensors.size(), first.name, first.tensors.size());
  }
  List list;
  list.meta = meta;
  list.rows.reserve(first.tensors.size());
  if (!first.tensors.empty()) list.device = first.tensors[0].device();
  const char* names[core::kSlots] = {};
  bool written[core::kSlots] = {};
  for (const Operand& operand : operands) {
    names[operand.slot] = operand.name;
    written[operand.slot] = operand.written;
  }
  for (size_t index = 0; index < first.tensors.size(); ++index) {
    const at::Tensor* tensors[core::kSlots] = {};
    for (const Operand& operand : operands) tensors[operand.slot] = &operand.tensors[index];
    list.add(op, tensors, written, group, [&](int slot) { return indexed(names[slot], index); });
  }
  return list;
}

core::Scalar scalar(double value) {
  return {nullptr, value, core::DType::kFloat64};
}

core::Scalar scalar(const at::Tensor& tensor, const List& list, const char* op, const char* name) {
  check_scalar_tensor(tensor, list.device, op, name);
  return {list.meta ? nullptr : tensor.const_data_ptr(), 0.0, core_dtype(tensor.scalar_type())};
}

float* float_pointer(const std::optional<at::Tensor>& tensor, const List& list, const char* op, const char* name) {
  if (!tensor || !tensor->defined()) return nullptr;
  check_float32_scalar(*tensor, list.device, op, name);
  return list.meta ? nullptr : static_cast<float*>(tensor->mutable_data_ptr());
}

core::SgdGroup sgd_group(const char* op, double lr, double momentum, double dampening, double weight_decay,
                         bool nesterov, bool maximize) {
  check_hyper_parameter(op, "lr", lr);
  check_hyper_parameter(op, "momentum", momentum);
  check_hyper_parameter(op, "weight_decay", weight_decay);
  return {scalar(lr), scalar(momentum), scalar(dampening), scalar(weight_decay), nesterov, maximize};
}

void run(const List& list, const core::ReduceParams* reduce, const core::UpdateParams* update,
         c10::ArrayRef<core::SgdGroup> groups) {
  if (list.meta) return;
  if (list.device.is_cpu()) return run_cpu(list, reduce, update, groups);
#ifdef TORCH_FASTDET_WITH_CUDA
  if (list.device.is_cuda()) return run_cuda(list, reduce, update, groups);
#endif
  TORCH_CHECK(false, "multi_tensor: the tensors are on ", list.device,
              ", but this build of torch_fastdet works on the CPU and, if it was built with nvcc, on CUDA devices");
}

core::ReduceParams reduction() {
  core::ReduceParams params{};
  params.norm_dtype = core::DType::kFloat32;
  return params;
}

core::UpdateParams update() {
  core::UpdateParams params{};
  params.decay = scalar(0.0);
  return params;
}

void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void ema(at::TensorList averages, at::TensorList values, double decay, bool meta) {
  const char* op = "multi_tensor_ema_";
  TORCH_CHECK(std::isfinite(decay), op, ": decay is ", decay, ", but a finite number is wanted");
  const List list =
      make_list(op, {{core::kAverage, "averages", averages, true}, {core::kParam, "values", values, false}}, -1, meta);
  core::UpdateParams params = update();
  params.ema = true;
  params.decay = scalar(decay);
  run(list, nullptr, &params, {});
  if (!meta) bump_versions(averages);
}

void ema(at::TensorList averages, at::TensorList values, const at::Tensor& decay, bool meta) {
  const char* op = "multi_tensor_ema_";
  const List list =
      make_list(op, {{core::kAverage, "averages", averages, true}, {core::kParam, "values", values, false}}, -1, meta);
  if (list.rows.empty()) return;
  core::UpdateParams params = update();
  params.ema = true;
  params.decay = scalar(decay, list, op, "decay");
  run(list, nullptr, &params, {});
  if (!meta) bump_versions(averages);
}

namespace {

template <typename MakeGroup>
void sgd_with(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, bool is_first_step,
              const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf, bool meta,
              const char* op, const MakeGroup& make_group) {
  const bool with_momentum = !momentum_buffers.empty();
  const bool unscales = grad_scale.has_value();
  const List list =
      with_momentum
          ? make_list(op,
                      {{core::kParam, "params", params, true},
                       {core::kGrad, "grads", grads, unscales},
                       {core::kMomentum, "momentum_buffers", momentum_buffers, true}},
                      0, meta)
          : make_list(op, {{core::kParam, "params", params, true}, {core::kGrad, "grads", grads, unscales}}, 0, meta);
  const core::SgdGroup group = make_group(list);
  core::UpdateParams update_params = update();
  update_params.sgd = true;
  update_params.first_step = is_first_step;
  set_found_inf_and_scale(update_params, list, grad_scale, found_inf, op);
  run(list, nullptr, &update_params, group);
  if (meta) return;
  bump_versions(params);
  bump_versions(momentum_buffers);
  if (unscales) bump_versions(grads);
}

void check_momentum_buffers(const char* op, at::TensorList params, at::TensorList momentum_buffers, double momentum) {
  TORCH_CHECK(momentum == 0.0 || !momentum_buffers.empty() || params.empty(), op, ": momentum is ", momentum,
              ", but momentum_buffers is empty; one buffer for each tensor of params is wanted");
}

}  // namespace

void sgd(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, double lr, double momentum,
         double dampening, double weight_decay, bool nesterov, bool maximize, bool is_first_step,
         const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf, bool meta) {
  const char* op = "multi_tensor_sgd_";
  check_momentum_buffers(op, params, momentum_buffers, momentum);
  const core::SgdGroup group = sgd_group(op, lr, momentum, dampening, weight_decay, nesterov, maximize);
  sgd_with(params, grads, momentum == 0.0 ? at::TensorList{} : momentum_buffers, is_first_step, grad_scale, found_inf,
           meta, op, [&](const List&) { return group; });
}

void sgd(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, const at::Tensor& lr,
         const at::Tensor& momentum, double dampening, double weight_decay, bool nesterov, bool maximize,
         bool is_first_step, const std::optional<at::Tensor>& grad_scale, const std::optional<at::Tensor>& found_inf,
         bool meta) {
  const char* op = "multi_tensor_sgd_";
  core::SgdGroup group = sgd_group(op, 0.0, 0.0, dampening, weight_decay, nesterov, maximize);
  sgd_with(params, grads, momentum_buffers, is_first_step, grad_scale, found_inf, meta, op, [&](const List& list) {
    if (!list.rows.empty()) {
      group.lr = scalar(lr, list, op, "lr");
      group.momentum = scalar(momentum, list, op, "momentum");
    }
    return group;
  });
}

void unscale(at::TensorList grads, const at::Tensor& scale, const at::Tensor& found_inf, bool meta) {
  const char* op = "multi_tensor_unscale_";
  const List list = make_list(op, {{core::kGrad, "grads", grads, true}}, -1, meta);
  if (list.rows.empty()) return;
  core::ReduceParams params = reduction();
  params.scale = float_pointer(scale, list, op, "scale");
  params.found_inf = float_pointer(found_inf, list, op, "found_inf");
  params.keep_found_inf = true;
  params.write_grads = true;
  run(list, &params, nullptr, {});
  if (meta) return;
  bump_versions(grads);
  bump_version(found_inf);
}

namespace {

at::Tensor norm_of(const List& list, core::ReduceParams& params) {
  at::Tensor result = empty_norm(list);
  params.norm_dtype = list.any_float64 ? core::DType::kFloat64 : core::DType::kFloat32;
  if (!list.meta) params.norm = result.mutable_data_ptr();
  return result;
}

}  // namespace

at::Tensor norm(at::TensorList tensors, bool meta) {
  const List list = make_list("multi_tensor_norm", {{core::kGrad, "tensors", tensors, false}}, -1, meta);
  core::ReduceParams params = reduction();
  const at::Tensor result = norm_of(list, params);
  run(list, &params, nullptr, {});
  return result;
}

at::Tensor clip_grad_norm(at::TensorList grads, double max_norm, bool meta) {
  const List list = make_list("multi_tensor_clip_grad_norm_", {{core::kGrad, "grads", grads, true}}, -1, meta);
  core::ReduceParams reduce = reduction();
  const at::Tensor result = norm_of(list, reduce);
  reduce.clip = true;
  reduce.max_norm = max_norm;
  core::UpdateParams scale = update();
  scale.use_workspace = true;
  scale.write_grads = true;
  run(list, &reduce, &scale, {});
  if (!meta) bump_versions(grads);
  return result;
}

}  // namespace torch_fastdet::multi_tensor

// A list without tensors names no device; the dispatcher then comes here. So do devices that are neither CPU nor CUDA.
TORCH_LIBRARY_IMPL(torch_fastdet, CompositeExplicitAutograd, m) {
  torch_fastdet::multi_tensor::implement<false>(m);
}
