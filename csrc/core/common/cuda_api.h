// Declare the types in launchers' signatures, also for builds without CUDA, which call no launcher.
#pragma once

#ifdef TORCH_FASTDET_WITH_CUDA
#include <cuda_runtime_api.h>
#else
enum cudaError_t : int;
using cudaStream_t = struct CUstream_st*;
#endif
