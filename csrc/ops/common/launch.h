// What every CUDA glue file does after its checks: guard the device, take the current stream, launch, report.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

namespace torch_fastdet {

inline void check_launch(cudaError_t error, const char* op) {
  TORCH_CHECK(error == cudaSuccess, op, ": the CUDA launch failed: ", cudaGetErrorString(error));
}

}  // namespace torch_fastdet
