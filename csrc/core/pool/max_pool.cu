// A block computes a row of pixels (channels_last) or a plane, so that its windows share L1; accesses are coalesced.
#include "core/pool/max_pool.h"

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"

namespace torch_fastdet::core {
namespace {

constexpr int kThreads = 256;
constexpr int kFastRadius = 2;  // of max_pool_values, which SPPF uses

struct Pixel {
  int64_t n, c;
  int h, w;
};

// Call f for each access of this block, distributed over its threads.
template <int kVector, typename F>
__device__ __forceinline__ void for_pixels(const MaxPoolParams& p, F&& f) {
  const auto width = static_cast<unsigned>(p.width), height = static_cast<unsigned>(p.height);
  const auto rows = p.channels_last ? height : static_cast<unsigned>(p.channels);
  const unsigned n = blockIdx.x / rows, row = blockIdx.x - n * rows;
  if (p.channels_last) {
    const auto vectors = static_cast<unsigned>(p.channels / kVector);
    for (unsigned i = threadIdx.x; i < width * vectors; i += kThreads) {
      const unsigned w = i / vectors;
      f(Pixel{n, int64_t{i - w * vectors} * kVector, static_cast<int>(row), static_cast<int>(w)});
    }
  } else {
    for (unsigned i = threadIdx.x; i < width * height; i += kThreads) {
      const unsigned h = i / width;
      f(Pixel{n, row, static_cast<int>(h), static_cast<int>(i - h * width)});
    }
  }
}

template <typename T, int kVector>
__device__ __forceinline__ Vector<T, kVector> load(const PoolTensor& tensor, int64_t at) {
  return *reinterpret_cast<const Vector<T, kVector>*>(static_cast<const T*>(tensor.data) + at);
}

template <typename T, int kVector>
__device__ __forceinline__ void store(const PoolTensor& tensor, int64_t at, const Vector<T, kVector>& pack) {
  *reinterpret_cast<Vector<T, kVector>*>(static_cast<T*>(tensor.data) + at) = pack;
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads) max_pool_forward(const __grid_constant__ MaxPoolParams p) {
  using A = arithmetic_t<T>;
  for_pixels<kVector>(p, [&](const Pixel& at) {
    const PoolSpan rows(at.h, p.source_height, p.before, p.after), columns(at.w, p.source_width, p.before, p.after);
    const int side = p.before + 1 + p.after;
    const int64_t center = p.source.offset(at.n, at.c, at.h, at.w);
    [[maybe_unused]] const int corner = (rows.first + p.before) * side + columns.first + p.before;
    Largest<A> best[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) best[j] = {-static_cast<A>(INFINITY), corner};
    for (int dy = rows.first; dy <= rows.last; ++dy) {
      for (int dx = columns.first; dx <= columns.last; ++dx) {
        const auto pack = load<T, kVector>(p.source, center + dy * p.source.stride[2] + dx * p.source.stride[3]);
        const int place = (dy + p.before) * side + dx + p.before;
#pragma unroll
        for (int j = 0; j < kVector; ++j) best[j].consider(to_arithmetic(pack.x[j]), place);
      }
    }
    Vector<T, kVector> pooled;
    Vector<uint8_t, kVector> places;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      pooled.x[j] = from_arithmetic<T>(best[j].value);
      places.x[j] = static_cast<uint8_t>(best[j].place);
    }
    store(p.target, p.target.offset(at.n, at.c, at.h, at.w), pooled);
    if (p.indices.data) store(p.indices, p.indices.offset(at.n, at.c, at.h, at.w), places);
    if (p.copy.data) store(p.copy, p.copy.offset(at.n, at.c, at.h, at.w), load<T, kVector>(p.source, center));
  });
}

__device__ __forceinline__ int clamped(int at, int size) {
  return at < 0 ? 0 : at < size ? at : size - 1;
}

// Compute the values of channels_last 5x5 windows, one access a thread. Reading the edge again outside is harmless.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads) max_pool_values(const __grid_constant__ MaxPoolParams p) {
  using A = arithmetic_t<T>;
  const auto width = static_cast<unsigned>(p.width), height = static_cast<unsigned>(p.height);
  const auto vectors = static_cast<unsigned>(p.channels / kVector);
  const unsigned i = blockIdx.x * kThreads + threadIdx.x, pixel = i / vectors, row = pixel / width, n = row / height;
  if (n >= p.batch) return;
  const int64_t c = int64_t{i - pixel * vectors} * kVector;
  const int h = static_cast<int>(row - n * height), w = static_cast<int>(pixel - row * width);
  A best[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) best[j] = -static_cast<A>(INFINITY);
#pragma unroll
  for (int dy = -kFastRadius; dy <= kFastRadius; ++dy) {
    const int y = clamped(h + dy, static_cast<int>(height));
#pragma unroll
    for (int dx = -kFastRadius; dx <= kFastRadius; ++dx) {
      const int x = clamped(w + dx, static_cast<int>(width));
      const auto pack = load<T, kVector>(p.source, p.source.offset(n, c, y, x));
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const A value = to_arithmetic(pack.x[j]);
        if (value > best[j] || value != value) best[j] = value;
      }
    }
  }
  Vector<T, kVector> pooled;
#pragma unroll
  for (int j = 0; j < kVector; ++j) pooled.x[j] = from_arithmetic<T>(best[j]);
  store(p.target, p.target.offset(n, c, h, w), pooled);
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads) max_pool_backward(const __grid_constant__ MaxPoolParams p) {
  using A = arithmetic_t<T>;
  for_pixels<kVector>(p, [&](const Pixel& at) {
    // In the window of a pixel (dy, dx) away, this pixel lies at (-dy, -dx); `after` is the forward pass's `before`.
    const PoolSpan rows(at.h, p.source_height, p.before, p.after), columns(at.w, p.source_width, p.before, p.after);
    const int side = p.before + 1 + p.after;
    const int64_t source = p.source.offset(at.n, at.c, at.h, at.w);
    const int64_t indices = p.indices.offset(at.n, at.c, at.h, at.w);
    A sum[kVector];
    Vector<T, kVector> own{};
    if (p.copy.data) own = load<T, kVector>(p.copy, p.copy.offset(at.n, at.c, at.h, at.w));
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] = to_arithmetic(own.x[j]);
    for (int dy = rows.first; dy <= rows.last; ++dy) {
      for (int dx = columns.first; dx <= columns.last; ++dx) {
        const auto places =
            load<uint8_t, kVector>(p.indices, indices + dy * p.indices.stride[2] + dx * p.indices.stride[3]);
        const auto grads = load<T, kVector>(p.source, source + dy * p.source.stride[2] + dx * p.source.stride[3]);
        const int place = (p.after - dy) * side + p.after - dx;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          if (places.x[j] == place) sum[j] += to_arithmetic(grads.x[j]);
        }
      }
    }
    Vector<T, kVector> total;
#pragma unroll
    for (int j = 0; j < kVector; ++j) total.x[j] = from_arithmetic<T>(sum[j]);
    store(p.target, p.target.offset(at.n, at.c, at.h, at.w), total);
  });
}

// Return whether accesses of `count` elements are aligned and end where the channels end.
bool takes_vectors(const MaxPoolParams& p, int count, int bytes) {
  if (!p.channels_last || p.channels % count) return false;
  const auto fits = [&](const PoolTensor& tensor, int size) {
    if (!tensor.data) return true;
    bool even = reinterpret_cast<uintptr_t>(tensor.data) % (count * size) == 0 && tensor.stride[1] == 1;
    for (const int d : {0, 2, 3}) even = even && tensor.stride[d] % count == 0;
    return even;
  };
  return fits(p.source, bytes) && fits(p.target, bytes) && fits(p.copy, bytes) && fits(p.indices, 1);
}

template <typename F>
cudaError_t launch(const MaxPoolParams& p, F&& f) {
  const auto rows = static_cast<unsigned>(p.batch * (p.channels_last ? p.height : p.channels));
  dispatch(p.dtype, [&](auto zero) {
    constexpr int kVector = 16 / sizeof(zero);
    if (takes_vectors(p, kVector, sizeof(zero))) {
      f(rows, zero, std::integral_constant<int, kVector>{});
    } else {
      f(rows, zero, std::integral_constant<int, 1>{});
    }
  });
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_max_pool_forward(const MaxPoolParams& params, cudaStream_t stream) {
  const int64_t elements = params.batch * params.channels * params.height * params.width;
  const bool values = !params.indices.data && !params.copy.data && params.before == kFastRadius &&
                      params.after == kFastRadius && params.source_height == params.height && params.channels_last &&
                      elements <= INT32_MAX;
  return launch(params, [&](unsigned rows, auto zero, auto vector) {
    if (values) {
      const auto blocks = static_cast<unsigned>(ceil_div(elements / decltype(vector)::value, kThreads));
      max_pool_values<decltype(zero), decltype(vector)::value><<<blocks, kThreads, 0, stream>>>(params);
      return;
    }
    max_pool_forward<decltype(zero), decltype(vector)::value><<<rows, kThreads, 0, stream>>>(params);
  });
}

cudaError_t launch_max_pool_backward(const MaxPoolParams& params, cudaStream_t stream) {
  return launch(params, [&](unsigned rows, auto zero, auto vector) {
    max_pool_backward<decltype(zero), decltype(vector)::value><<<rows, kThreads, 0, stream>>>(params);
  });
}

}  // namespace torch_fastdet::core
