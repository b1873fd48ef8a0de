// Bound by memory: a block makes one row of the result, and neighbouring threads write neighbouring 16 bytes of it.
#include "core/space_to_depth/space_to_depth.h"

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"

namespace torch_fastdet::core {
namespace {

constexpr int kThreads = 256;

template <typename From, typename To, int kVector>
__global__ void __launch_bounds__(kThreads) space_to_depth(const __grid_constant__ SpaceToDepthParams p) {
  const unsigned height = static_cast<unsigned>(p.deep_height());
  const unsigned n = blockIdx.x / height, h = blockIdx.x - n * height;
  const unsigned vectors = static_cast<unsigned>(p.deep_channels / kVector);
  const unsigned accesses = static_cast<unsigned>(p.deep_width()) * vectors;
  using Pack = Vector<To, kVector>;
  Pack* const row = reinterpret_cast<Pack*>(static_cast<To*>(p.target) + n * p.deep_stride[0] + h * p.deep_stride[2]);
  for (unsigned i = threadIdx.x; i < accesses; i += kThreads) {
    const unsigned w = i / vectors, first = (i - w * vectors) * kVector;
    Pack pack;
#pragma unroll
    for (int j = 0; j < kVector; ++j) pack.x[j] = deep_element<From, To>(p, n, h, w, first + j);
    row[i] = pack;
  }
}

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) depth_to_space(const __grid_constant__ SpaceToDepthParams p) {
  const unsigned height = static_cast<unsigned>(p.height), width = static_cast<unsigned>(p.width);
  const unsigned channels = static_cast<unsigned>(p.channels);
  const unsigned n = blockIdx.x / height, y = blockIdx.x - n * height;
  const bool channels_first = p.image_stride[3] == 1 && channels > 1;
  To* const row = static_cast<To*>(p.target) + n * p.image_stride[0] + y * p.image_stride[2];
  for (unsigned i = threadIdx.x; i < width * channels; i += kThreads) {
    const unsigned x = channels_first ? i % width : i / channels, c = channels_first ? i / width : i % channels;
    row[c * p.image_stride[1] + x * p.image_stride[3]] = image_element<From, To>(p, n, y, x, c);
  }
}

template <typename F>
void dispatch_types(const SpaceToDepthParams& p, F&& f) {
  dispatch(p.source_dtype, [&](auto from) { dispatch(p.target_dtype, [&](auto to) { f(from, to); }); });
}

}  // namespace

cudaError_t launch_space_to_depth(const SpaceToDepthParams& params, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(params.batch * params.deep_height());
  const auto launch = [&](auto from, auto to) {
    using From = decltype(from);
    using To = decltype(to);
    constexpr int kVector = 16 / sizeof(To);
    if (params.deep_channels % kVector == 0 && reinterpret_cast<uintptr_t>(params.target) % 16 == 0) {
      space_to_depth<From, To, kVector><<<rows, kThreads, 0, stream>>>(params);
    } else {
      space_to_depth<From, To, 1><<<rows, kThreads, 0, stream>>>(params);
    }
  };
  if (params.bytes) {
    dispatch(params.target_dtype, [&](auto to) { launch(uint8_t{}, to); });
  } else {
    dispatch_types(params, launch);
  }
  return cudaGetLastError();
}

cudaError_t launch_depth_to_space(const SpaceToDepthParams& params, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(params.batch * params.height);
  dispatch_types(params, [&](auto from, auto to) {
    depth_to_space<decltype(from), decltype(to)><<<rows, kThreads, 0, stream>>>(params);
  });
  return cudaGetLastError();
}

}  // namespace torch_fastdet::core
