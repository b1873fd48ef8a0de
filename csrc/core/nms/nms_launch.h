// The entry to suppression on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "core/nms/nms_plan.h"

namespace torch_fastdet::core {

// `workspace`: plan.bytes, aligned to 256. Queues kernels on `stream`; returns at once.
cudaError_t launch_nms(const CandidateSource& source, const NmsOptions& options, const ClassFilter& filter,
                       const NmsOutput& output, const NmsPlan& plan, void* workspace, cudaStream_t stream);

}  // namespace torch_fastdet::core
