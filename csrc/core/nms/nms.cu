// Launch a whole suppression: workspace, selection, sort and greedy suppression.
#include "core/nms/nms_device.cuh"

namespace torch_fastdet::core {

cudaError_t launch_nms(const CandidateSource& source, const NmsOptions& options, const ClassFilter& filter,
                       const NmsOutput& output, const NmsPlan& plan, void* workspace, cudaStream_t stream) {
  if (plan.images == 0) return cudaSuccess;
  if (plan.kept == 0) {  // no candidates, or no detections wanted
    const size_t rows = static_cast<size_t>(plan.images * options.max_detections);
    const size_t value = source.dtype == DType::kFloat64 ? 8 : 4;
    cudaError_t error = cudaMemsetAsync(output.counts, 0, static_cast<size_t>(plan.images) * 8, stream);
    if (error == cudaSuccess && rows) {
      error = cudaMemsetAsync(output.detections, 0, rows * (6 + static_cast<size_t>(source.extra)) * value, stream);
      if (error == cudaSuccess) error = cudaMemsetAsync(output.indices, 0xff, rows * 8, stream);
    }
    return error;
  }
  NmsKernel kernel{};
  static_cast<NmsOffsets&>(kernel) = plan;
  kernel.source = source;
  kernel.options = options;
  kernel.output = output;
  kernel.workspace = static_cast<char*>(workspace);
  kernel.capacity = plan.capacity;
  kernel.kept = plan.kept;
  kernel.cuts = plan.cuts;
  kernel.sorts_small = !plan.wide && plan.merges == 0;
  kernel.merges = static_cast<int32_t>(plan.merges);
  cudaError_t error = cudaMemsetAsync(workspace, 0, plan.zeroed, stream);
  if (error == cudaSuccess) error = launch_select(kernel, plan, filter, stream);
  if (error == cudaSuccess) error = launch_sort(kernel, plan, stream);
  if (error == cudaSuccess) {
    error = plan.wide ? launch_suppress_wide(kernel, plan, stream) : launch_suppress(kernel, plan, stream);
  }
  return error;
}

}  // namespace torch_fastdet::core
