// Check lists of tensors and turn them into core rows, for the multi_tensor operators and MultiTensorState.
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

// Hold a list of tensors under the user's name for it, in one slot of the rows.
struct Operand {
  core::Slot slot;
  const char* name;
  at::TensorList tensors;
  bool written;
};

// Hold rows of one device. If `meta`, shapes are checked, but there are no pointers and nothing runs.
struct List {
  std::vector<core::Row> rows;
  std::vector<core::Layout> layouts;
  at::Device device = at::kCPU;
  bool float32_only = true;
  std::optional<at::ScalarType> grad_type;  // promoted type of the tensors in kGrad; none if there are none
  bool meta = false;
  bool narrow_second = false;  // bfloat16 in kSecond does not affect float32_only
  // The reduction leaves here what the update reads, if other lists read it too; null: the list has its own memory.
  core::Workspace* workspace = nullptr;
  // The device's work list and the stream that it serves. A run sets them; they are valid until the rows change.
  mutable std::shared_ptr<const void> plan;
  mutable int64_t plan_stream = 0;
  // A graph that captures a run on these rows must keep these tensors alive as well.
  std::vector<at::Tensor> owned_by_graph;

  // Append a row of tensors in slots, undefined if missing, unless all are. `name(slot)` names a tensor in an error.
  void add(const char* op, const at::Tensor* const tensors[core::kSlots], const bool written[core::kSlots],
           int32_t group, const std::function<std::string(int)>& name);

 private:
  void add_grad_type(const at::Tensor& grad);
};

// Check the lists of an operator against one another and return their rows, all of group `group`.
List make_list(const char* op, std::initializer_list<Operand> operands, int32_t group, bool meta);

core::Scalar scalar(double value);
// Return a one-element tensor on the list's device as a scalar that the kernel reads when it runs.
core::Scalar scalar(const at::Tensor& tensor, const List& list, const char* op, const char* name);
// Return the pointer of a one-element float32 tensor (a scale, a flag) on the list's device, or null.
float* float_pointer(const std::optional<at::Tensor>& tensor, const List& list, const char* op, const char* name);

// Run either step or both; the update uses the reduction's results. `groups` may be longer than one launch takes.
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
// Return a tensor for the norm that `params` will compute: float64 if any gradient is, else float32.
at::Tensor empty_norm(const List& list, core::ReduceParams& params);
// Return the norm in the type that torch's functions return, which is that of the gradients.
at::Tensor as_torch_returns(const at::Tensor& norm, const List& list);
core::UpdateParams update();

// Bump the version counter, as PyTorch's in-place operators do, because autograd compares it.
void bump_version(const at::Tensor& tensor);
void bump_versions(at::TensorList tensors);

}  // namespace torch_fastdet::multi_tensor
