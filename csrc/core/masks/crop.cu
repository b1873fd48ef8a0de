// Run crop.h on the GPU. A warp takes a row, and each thread takes 16 bytes if rows allow it.
#include "core/masks/crop.h"

#include <algorithm>

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"

namespace torch_fastdet::core {
namespace {

constexpr int kRows = 8;  // rows of a block, one per warp
constexpr int64_t kMaxBlocks = int64_t{1} << 20;

template <typename T, int kCount>
__global__ void __launch_bounds__(kRows* kWarp) crop_kernel(const CropParams p) {
  using Pixels = Vector<T, kCount>;
  const int32_t lane = threadIdx.x % kWarp, accesses = p.width / kCount;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kWarp; row < p.count * p.height;
       row += static_cast<int64_t>(gridDim.x) * kRows) {
    const PixelRange kept = columns_kept(p, row);
    const Pixels* in = static_cast<const Pixels*>(p.masks) + row * accesses;
    Pixels* out = static_cast<Pixels*>(p.out) + row * accesses;
    for (int32_t access = lane; access < accesses; access += kWarp) {
      const int32_t first = access * kCount;
      if (in == out && first >= kept.low && first + kCount <= kept.high) continue;
      Pixels pixels = in[access];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        pixels.x[i] = cropped(pixels.x[i], first + i >= kept.low && first + i < kept.high);
      }
      out[access] = pixels;
    }
  }
}

template <typename T>
void launch_type(const CropParams& p, cudaStream_t stream) {
  constexpr int kCount = 16 / sizeof(T);
  const int64_t blocks = std::min(ceil_div(p.count * p.height, kRows), kMaxBlocks);
  const bool vectors = p.width % kCount == 0 && reinterpret_cast<uintptr_t>(p.masks) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  const auto kernel = vectors ? crop_kernel<T, kCount> : crop_kernel<T, 1>;
  kernel<<<static_cast<unsigned>(blocks), kRows * kWarp, 0, stream>>>(p);
}

}  // namespace

cudaError_t launch_crop(const CropParams& params, cudaStream_t stream) {
  if (params.count == 0 || params.height == 0 || params.width == 0) return cudaSuccess;
  const auto launch = [&](auto zero) { launch_type<decltype(zero)>(params, stream); };
  params.integer_bytes ? with_integer(params.integer_bytes, launch) : dispatch(params.dtype, launch);
  return cudaGetLastError();
}

}  // namespace torch_fastdet::core
