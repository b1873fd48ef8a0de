// Launch on the current stream and report a launch that failed.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

namespace torch_fastdet {

// Return the current stream of the current device; set the device guard first.
inline cudaStream_t current_stream() {
  return c10::cuda::getCurrentCUDAStream();
}

inline void check_launch(cudaError_t error, const char* op) {
  TORCH_CHECK(error == cudaSuccess, op, ": the CUDA launch failed: ", cudaGetErrorString(error));
}

}  // namespace torch_fastdet
