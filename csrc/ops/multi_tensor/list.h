// Checked lists of tensors as core rows, for the multi_tensor operators and MultiTensorState on every device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/multi_tensor/multi_tensor.h"

namespace torch_fastdet::multi_tensor {

// A list of tensors as the user names it, in one slot of the rows.
struct Operand {
  core::Slot slot;
  const char* name;
  at::TensorList tensors;
  bool written;
};

// Rows of one device. `meta`: shapes are checked, but there are no pointers and nothing is to be done.
struct List {
  std::vector<core::Row> rows;
  std::vector<core::Layout> layouts;
  at::Device device = at::kCPU;
  bool float32_only = true;
  std::optional<at::ScalarType> grad_type;  // what the tensors in kGrad promote to; none if there are none
  bool meta = false;
  bool narrow_second = false;  // bfloat16 in kSecond does not count against float32_only
  // The memory where the reduction leaves what the update reads, if other lists read it too; null: this list's own.
  core::Workspace* workspace = nullptr;
  // The work list of the device, and the stream it serves; set by a run, good as long as the rows are the same.
  mutable std::shared_ptr<const void> plan;
  mutable int64_t plan_stream = 0;
  // Tensors that a graph that captures a run on these rows must keep alive besides them.
  std::vector<at::Tensor> owned_by_graph;

  // Append a row of tensors in slots, undefined where missing; without any, none. `name(slot)` names one in an error.
  void add(const char* op, const at::Tensor* const tensors[core::kSlots], const bool written[core::kSlots],
           int32_t group, const std::function<std::string(int)>& name);

 private:
  void add_grad_type(const at::Tensor& grad);
};

// Check the lists of an operator against one another and return their rows, all of group `group`.
List make_list(const char* op, std::initializer_list<Operand> operands, int32_t group, bool meta);

core::Scalar scalar(double value);
// A one-element tensor on the list's device, read there, when the kernel runs.
core::Scalar scalar(const at::Tensor& tensor, const List& list, const char* op, const char* name);
// A one-element float32 tensor (a scale, a flag) on the list's device; null for none.
float* float_pointer(const std::optional<at::Tensor>& tensor, const List& list, const char* op, const char* name);

// Run either step or both, the update with what the reduction found. `groups` may be longer than one launch takes.
void run(const List& list, const core::ReduceParams* reduce, const core::UpdateParams* update,
         c10::ArrayRef<core::Group> groups);
void run_cpu(const List& list, const core::ReduceParams* reduce, const core::UpdateParams* update,
             c10::ArrayRef<core::Group> groups);
#ifdef TORCH_FASTDET_WITH_CUDA
void run_cuda(const List& list, const core::ReduceParams* reduce, const core::UpdateParams* update,
              c10::ArrayRef<core::Group> groups);
bool is_capturing(const List& list);
#else
inline bool is_capturing(const List&) {
  return false;
}
#endif

core::ReduceParams reduction();
// The norm that `params` will leave: float64 where a gradient is, else float32.
at::Tensor empty_norm(const List& list, core::ReduceParams& params);
// Return it in the type that torch's functions return, which is that of the gradients.
at::Tensor as_torch_returns(const at::Tensor& norm, const List& list);
core::UpdateParams update();

// In-place operators of PyTorch count the writes, and autograd compares the count.
void bump_version(const at::Tensor& tensor);
void bump_versions(at::TensorList tensors);

}  // namespace torch_fastdet::multi_tensor
