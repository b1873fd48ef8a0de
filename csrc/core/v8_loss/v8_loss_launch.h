// The steps of a forward pass, each a launch or a few.
#pragma once

#include "core/v8_loss/v8_loss.h"

namespace torch_fastdet::core {

cudaError_t launch_v8_start(const V8LossParams& params, int64_t class_blocks, cudaStream_t stream);
cudaError_t launch_v8_assign(const V8LossParams& params, cudaStream_t stream);
cudaError_t launch_v8_terms(const V8LossParams& params, cudaStream_t stream);
cudaError_t launch_v8_finish(const V8LossParams& params, int64_t class_blocks, cudaStream_t stream);

}  // namespace torch_fastdet::core
