// The types that launchers are declared with, in builds without CUDA too, which call none of them.
#pragma once

#ifdef TORCH_FASTDET_WITH_CUDA
#include <cuda_runtime_api.h>
#else
enum cudaError_t : int;
using cudaStream_t = struct CUstream_st*;
#endif
