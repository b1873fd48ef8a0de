// Run multi_tensor on the CPU: the core's loops on Torch's threads.
#include "core/multi_tensor/multi_tensor_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/multi_tensor/run.h"

namespace torch_fastdet::multi_tensor {

void run_cpu(const List& list, const core::ReduceParams* reduce, const core::UpdateParams* update,
             c10::ArrayRef<core::Group> groups) {
  namespace loops = core::multi_tensor_loops;
  const loops::Work work(list.rows, list.layouts);
  core::Workspace own{};
  own.inv_scale = 1.f;
  own.clip = 1.0;
  core::Workspace& workspace = list.workspace ? *list.workspace : own;
  if (reduce) loops::reduce<TorchHalves>(work, *reduce, workspace, parallel_for);
  if (update) loops::update<TorchHalves>(work, *update, groups.data(), workspace, parallel_for);
}

namespace {

// Serve every device: the list knows its own, and an empty list has none.
struct AnyDevice : OnDevice {
  static void run(const List& list, const core::ReduceParams* reduce, const core::UpdateParams* update,
                  c10::ArrayRef<core::Group> groups) {
    multi_tensor::run(list, reduce, update, groups);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_multi_tensor<AnyDevice>(m);
}

TORCH_LIBRARY_IMPL(torch_fastdet, CompositeExplicitAutograd, m) {
  register_multi_tensor<AnyDevice>(m);
}

}  // namespace torch_fastdet::multi_tensor
