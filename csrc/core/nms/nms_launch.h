// This is the entry point of suppression on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "core/nms/nms_plan.h"

namespace torch_fastdet::core {

// `workspace` has plan.bytes bytes and is aligned to 256. The kernels are queued on `stream` without waiting for them.
cudaError_t launch_nms(const CandidateSource& source, const NmsOptions& options, const ClassFilter& filter,
                       const NmsOutput& output, const NmsPlan& plan, void* workspace, cudaStream_t stream);

}  // namespace torch_fastdet::core
