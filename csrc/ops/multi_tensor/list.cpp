// Turn lists of tensors into core rows, for the multi_tensor operators and MultiTensorState on any device.
#include "ops/multi_tensor/list.h"

#include <ATen/ops/empty.h>

#include "core/multi_tensor/multi_tensor_plan.h"
#include "ops/multi_tensor/checks.h"

namespace torch_fastdet::multi_tensor {
namespace {

bool lie_alike(const at::Tensor& tensor, const at::Tensor& first) {
  return tensor.is_contiguous() ? first.is_contiguous() : tensor.strides().equals(first.strides());
}

}  // namespace

void List::add_grad_type(const at::Tensor& grad) {
  grad_type = grad_type ? c10::promoteTypes(*grad_type, grad.scalar_type()) : grad.scalar_type();
}

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
      if (slot == core::kGrad) add_grad_type(*tensor);
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
    const bool narrow = narrow_second && slot == core::kSecond && dtype == core::DType::kBFloat16;
    float32_only = float32_only && (dtype == core::DType::kFloat32 || narrow);
    if (slot == core::kGrad) add_grad_type(*tensor);
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
                " dimensions, but at most ", core::kMaxDims, " are expected; make them contiguous");
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

void run(const List& list, const core::ReduceParams* reduce, const core::UpdateParams* update,
         c10::ArrayRef<core::Group> groups) {
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

at::Tensor empty_norm(const List& list, core::ReduceParams& params) {
  const bool wide = list.grad_type == at::kDouble;
  params.norm_dtype = wide ? core::DType::kFloat64 : core::DType::kFloat32;
  const at::Tensor norm = at::empty({}, at::TensorOptions().device(list.device).dtype(wide ? at::kDouble : at::kFloat));
  if (!list.meta) params.norm = norm.mutable_data_ptr();
  return norm;
}

at::Tensor as_torch_returns(const at::Tensor& norm, const List& list) {
  return norm.to(list.grad_type.value_or(at::kFloat));
}

core::UpdateParams update() {
  core::UpdateParams params{};
  params.decay = scalar(0.0);
  return params;
}

void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void bump_versions(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) bump_version(tensor);
}

}  // namespace torch_fastdet::multi_tensor
