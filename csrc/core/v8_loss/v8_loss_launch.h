// Each of these steps of a pass launches one or a few kernels.
#pragma once

#include "core/v8_loss/v8_loss.h"

namespace torch_fastdet::core {

template <typename Params>
cudaError_t launch_v8_start(const Params& params, int64_t class_blocks, cudaStream_t stream);
template <typename Params>
cudaError_t launch_v8_assign(const Params& params, cudaStream_t stream);

cudaError_t launch_v8_terms(const V8LossParams& params, cudaStream_t stream);
cudaError_t launch_v8_finish(const V8LossParams& params, int64_t class_blocks, cudaStream_t stream);

cudaError_t launch_v8_dense(const V8LossBackwardParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
