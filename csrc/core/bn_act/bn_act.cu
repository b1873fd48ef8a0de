// In each direction, the first kernel computes statistics or sums and the second one the result (see bn_act.h).
#include <type_traits>

#include "core/bn_act/bn_act.h"
#include "core/common/device.cuh"
#include "core/common/dtype.cuh"

namespace torch_fastdet::core {
namespace {

// These are the best on an H200 among 256 and 512 threads, one to three blocks and one to eight accesses.
constexpr int kThreads = kBnActThreads;
constexpr int kBlocksPerSm = 2;
constexpr int kUnroll = 8;     // accesses in flight of a thread that reads one tensor
constexpr int kUnrollTwo = 4;  // the same for each of two tensors
// In evaluation, latency dominates the time of a small tensor: the code should be short and the threads many.
constexpr int kEvalBlocksPerSm = 3;
constexpr int kEvalUnroll = 2;

template <typename A>
struct alignas(2 * sizeof(A)) Pair {
  A first, second;
};

template <typename A, typename T, int kVector>
__device__ __forceinline__ void unpack(const Vector<T, kVector>& pack, A (&out)[kVector]) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) out[j] = to_arithmetic(pack.x[j]);
}

// Convert to the storage type. One instruction rounds two halves.
template <typename A, typename T, int kVector>
__device__ __forceinline__ Vector<T, kVector> packed(const A (&in)[kVector]) {
  Vector<T, kVector> pack;
  if constexpr (kVector % 2 == 0 && std::is_same_v<T, __half>) {
#pragma unroll
    for (int j = 0; j < kVector; j += 2) {
      const __half2 two = __floats2half2_rn(in[j], in[j + 1]);
      pack.x[j] = two.x;
      pack.x[j + 1] = two.y;
    }
  } else if constexpr (kVector % 2 == 0 && std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int j = 0; j < kVector; j += 2) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(in[j], in[j + 1]);
      pack.x[j] = two.x;
      pack.x[j + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kVector; ++j) pack.x[j] = from_arithmetic<T>(in[j]);
  }
  return pack;
}

template <int kVector, typename T>
__device__ __forceinline__ Vector<T, kVector> load(const T* from) {
  return *reinterpret_cast<const Vector<T, kVector>*>(from);
}

template <typename A>
__device__ __forceinline__ A load_vector(const BnActVector& vector, int64_t i, A otherwise) {
  return vector.data ? load_element<A>(vector.data, vector.dtype, i) : otherwise;
}

template <typename A>
__device__ __forceinline__ void store_vector(const BnActVector& vector, int64_t i, A value) {
  if (vector.data) store_element(vector.data, vector.dtype, i, value);
}

// A thread visits every `step`-th position of its block's split, at one place of the slice.
struct Walk {
  int image, position;  // image and position of the next access
  int extent;
  int step_images, step_positions;
  int count;  // accesses of this thread

  // Start at the thread's first access, or at its last one for a backward walk.
  __device__ __forceinline__ Walk(const BnActPlan& plan, int split, int row, int rows, bool from_end)
      : extent(plan.extent), step_images(plan.step_images), step_positions(plan.step_positions) {
    const int size = plan.split_size(split);
    count =
        row < size ? static_cast<int>(static_cast<unsigned>(size - row + rows - 1) / static_cast<unsigned>(rows)) : 0;
    const int64_t start = plan.split_begin(split) + row + (from_end && count ? int64_t{count - 1} * rows : 0);
    // A 64-bit division takes a considerable part of a small tensor's time.
    image = start <= INT32_MAX ? static_cast<int>(static_cast<unsigned>(start) / static_cast<unsigned>(extent))
                               : static_cast<int>(start / extent);
    position = static_cast<int>(start - int64_t{image} * extent);
  }
  __device__ __forceinline__ void advance() {
    image += step_images;
    position += step_positions;
    if (position >= extent) {
      position -= extent;
      ++image;
    }
  }
  __device__ __forceinline__ void retreat() {
    image -= step_images;
    position -= step_positions;
    if (position < 0) {
      position += extent;
      --image;
    }
  }
  __device__ __forceinline__ int64_t offset(const BnActStrides& strides) const {
    return image * strides.image + position * strides.position;
  }
};

// Locate a thread. Slices lie along x and splits along y of the grid.
struct Place {
  int slice, split;
  int row, rows;     // among the positions of the block
  int column;        // access within a position
  bool active;       // whether it has a place at all
  int64_t channel;   // first channel of the thread
  int channel_step;  // step to the channel of its next element: 0 in NCHW

  __device__ __forceinline__ explicit Place(const BnActPlan& plan)
      : Place(plan, blockIdx.x / static_cast<unsigned>(plan.splits),
              static_cast<int>(blockIdx.x % static_cast<unsigned>(plan.splits))) {}
  __device__ __forceinline__ Place(const BnActPlan& plan, int slice, int split) : slice(slice), split(split) {
    rows = plan.rows;
    row = threadIdx.x / static_cast<unsigned>(plan.slice_vectors);
    column = static_cast<int>(threadIdx.x) - row * plan.slice_vectors;
    channel = int64_t{slice} * plan.slice_channels + column * plan.vector;
    channel_step = plan.channels_last;
    active = row < rows && channel < plan.channels;
  }
  // Return the offset of the thread's first element in a tensor that begins at channel `first`.
  __device__ __forceinline__ int64_t offset(const BnActStrides& strides, int64_t first = 0) const {
    return (channel - first) * strides.channel;
  }
};

template <typename Params>
__device__ __forceinline__ const auto& part_of(const Params& p, int64_t channel) {
  int i = 0;
  while (i + 1 < p.part_count && channel >= p.parts[i + 1].first) ++i;
  return p.parts[i];
}

// Add up the block's pairs (kVector per thread; in NCHW all of one channel). Thread c returns the sums of channel c.
template <typename A, int kVector>
struct BlockSums {
  Pair<A> pairs[kThreads * (kVector + 1)];

  __device__ __forceinline__ Pair<A> reduce(const BnActPlan& plan, const Place& place, const A (&first)[kVector],
                                            const A (&second)[kVector]) {
    const int vectors = plan.slice_vectors, channels = plan.slice_channels;
    const int pitch = plan.channels_last ? channels + vectors : 1;  // padding against bank conflicts
    if (place.row < place.rows) {
      if (plan.channels_last) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          pairs[place.row * pitch + j * vectors + place.column] = {first[j], second[j]};
        }
      } else {
        Pair<A> sum{first[0], second[0]};
#pragma unroll
        for (int j = 1; j < kVector; ++j) {
          sum.first += first[j];
          sum.second += second[j];
        }
        pairs[place.row] = sum;
      }
    }
    __syncthreads();
    // Thread (group, c) adds up every groups-th row of channel c.
    const int groups = plan.groups;
    const int group = threadIdx.x / static_cast<unsigned>(channels), c = threadIdx.x - group * channels;
    const int at = plan.channels_last ? c % kVector * vectors + c / kVector : 0;
    Pair<A> sum{A(0), A(0)};
    if (group < groups) {
      for (int row = group; row < place.rows; row += groups) {
        const Pair<A> pair = pairs[row * pitch + at];
        sum.first += pair.first;
        sum.second += pair.second;
      }
    }
    __syncthreads();
    return fold(channels, groups, group, c, sum);
  }

  // Add up the pairs of threads (group, c) over the groups. Thread c returns the sum of channel c.
  __device__ __forceinline__ Pair<A> fold(int channels, int groups, int group, int c, Pair<A> sum) {
    int half = 1;
    while (half < groups) half *= 2;
    for (half /= 2; half > 0; half /= 2) {
      if (group >= half && group < 2 * half && group < groups) pairs[(group - half) * channels + c] = sum;
      __syncthreads();
      if (group < half && group + half < groups) {
        const Pair<A> other = pairs[group * channels + c];
        sum.first += other.first;
        sum.second += other.second;
      }
      __syncthreads();
    }
    return sum;
  }
};

template <typename A>
__device__ __forceinline__ void store_partial(const BnActPlan& plan, const Place& place, void* partials,
                                              Pair<A> partial) {
  const int64_t at = (int64_t{place.slice} * plan.splits + place.split) * plan.slice_channels + threadIdx.x;
  static_cast<Pair<A>*>(partials)[at] = partial;
}

// Return the activation's input. For half precision, `shift` includes the mean: a product with it would lose less.
template <bool kHalf, typename A>
__device__ __forceinline__ A normalized(A x, A mean, A scale, A shift) {
  return kHalf ? x * scale + shift : (x - mean) * scale + shift;
}

// Forward pass 1: compute each block's mean and squared deviations, relative to its first value for precision.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    bn_act_statistics(const __grid_constant__ BnActForwardParams p) {
  using A = arithmetic_t<T>;
  __shared__ BlockSums<A, kVector> sums;
  const Place place(p.plan);
  A shift[kVector], first[kVector], second[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) shift[j] = first[j] = second[j] = A(0);
  const T* const x = static_cast<const T*>(p.x) + place.offset(p.x_strides);
  if (place.active) {
    const Walk origin(p.plan, place.split, 0, place.rows, false);
    const int64_t at = origin.offset(p.x_strides);
#pragma unroll
    for (int j = 0; j < kVector; ++j) shift[j] = to_arithmetic(x[at + (p.plan.channels_last ? j : 0)]);
    Walk walk(p.plan, place.split, place.row, place.rows, false);
    for (int k = 0; k < walk.count; k += kUnroll) {
      Vector<T, kVector> packs[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (k + u < walk.count) packs[u] = load<kVector>(x + walk.offset(p.x_strides));
        walk.advance();
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (k + u < walk.count) {
          A value[kVector];
          unpack(packs[u], value);
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            const A centered = value[j] - shift[j];
            first[j] += centered;
            second[j] += centered * centered;
          }
        }
      }
    }
  }
  const Pair<A> sum = sums.reduce(p.plan, place, first, second);
  if (threadIdx.x < p.plan.slice_channels) {
    const int64_t c = int64_t{place.slice} * p.plan.slice_channels + threadIdx.x;
    Pair<A> partial{A(0), A(0)};
    if (c < p.plan.channels) {
      const Walk origin(p.plan, place.split, 0, place.rows, false);
      const A base = to_arithmetic(static_cast<const T*>(p.x)[c * p.x_strides.channel + origin.offset(p.x_strides)]);
      const A n = static_cast<A>(p.plan.split_size(place.split)) * p.plan.channel_elements();
      const A mean = sum.first / n;
      partial = {base + mean, sum.second - sum.first * mean};
    }
    store_partial(p.plan, place, p.partials, partial);
  }
}

// Gather a channel's partials in threads (group, c), each from every groups-th split, by add(sum, split, partial).
template <typename A, typename Add>
__device__ __forceinline__ Pair<A> gather(const BnActPlan& plan, int slice, const void* partials, int groups, int group,
                                          int c, Add&& add) {
  const Pair<A>* const from =
      static_cast<const Pair<A>*>(partials) + int64_t{slice} * plan.splits * plan.slice_channels + c;
  Pair<A> sum{A(0), A(0)};
  if (group < groups) {
#pragma unroll 8
    for (int split = group; split < plan.splits; split += groups) add(sum, split, from[split * plan.slice_channels]);
  }
  return sum;
}

template <typename A>
struct Coefficients {
  A value[5][kBnActMostSliceVectors * 8];
};

template <typename A>
__device__ __forceinline__ void store_statistics(const BnActForwardParams& p, const BnActForwardPart& part,
                                                 int64_t channel, A n, A mean, A variance, A invstd) {
  static_cast<A*>(p.mean)[channel] = mean;
  static_cast<A*>(p.invstd)[channel] = invstd;
  const A momentum = static_cast<A>(p.momentum);
  const int64_t own = channel - part.first;
  if (part.running_mean.data) {
    const A old = load_vector(part.running_mean, own, A(0));
    store_vector(part.running_mean, own, momentum * mean + (A(1) - momentum) * old);
  }
  if (part.running_var.data) {
    const A old = load_vector(part.running_var, own, A(0));
    store_vector(part.running_var, own, momentum * (variance * (n / (n - A(1)))) + (A(1) - momentum) * old);
  }
  if (own == 0 && part.num_batches_tracked) ++*part.num_batches_tracked;
}

// Merge the partials of pass 1 into the mean, scale and shift of each channel of the block's slice.
template <typename A, int kVector>
__device__ __forceinline__ void merge_statistics(const BnActForwardParams& p, const Place& place,
                                                 BlockSums<A, kVector>& sums, Coefficients<A>& coefficients) {
  const int channels = p.plan.slice_channels, groups = p.plan.groups;
  const int group = threadIdx.x / static_cast<unsigned>(channels), c = threadIdx.x - group * channels;
  const A origin = static_cast<const Pair<A>*>(p.partials)[int64_t{place.slice} * p.plan.splits * channels + c].first;
  // This merge of means and squared deviations is Chan, Golub and LeVeque's, relative to the first split's mean.
  Pair<A> sum =
      gather<A>(p.plan, place.slice, p.partials, groups, group, c, [&](Pair<A>& total, int split, const Pair<A>& part) {
        const A n = static_cast<A>(p.plan.split_size(split)) * p.plan.channel_elements();
        const A delta = part.first - origin;
        total.first += n * delta;
        total.second += part.second + n * delta * delta;
      });
  sum = sums.fold(channels, groups, group, c, sum);
  const int64_t channel = int64_t{place.slice} * channels + c;
  if (group == 0 && channel < p.plan.channels) {
    const BnActForwardPart& part = part_of(p, channel);
    const A n = static_cast<A>(p.plan.count());
    const A delta = sum.first / n;
    const A mean = origin + delta;
    const A squares = sum.second - sum.first * delta;
    const A variance = (squares < A(0) ? A(0) : squares) / n;
    const A invstd = A(1) / sqrt(variance + static_cast<A>(p.eps));
    coefficients.value[0][c] = mean;
    coefficients.value[1][c] = invstd * load_vector(part.weight, channel - part.first, A(1));
    coefficients.value[2][c] = load_vector(part.bias, channel - part.first, A(0));
    if (place.split == 0) store_statistics(p, part, channel, n, mean, variance, invstd);
  }
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) bn_act_forward(const __grid_constant__ BnActForwardParams p) {
  using A = arithmetic_t<T>;
  constexpr bool kHalf = sizeof(T) == 2;
  __shared__ BlockSums<A, kVector> sums;
  __shared__ Coefficients<A> coefficients;
  const Place place(p.plan);
  merge_statistics(p, place, sums, coefficients);
  __syncthreads();
  if (!place.active) return;
  A mean[kVector], scale[kVector], shift[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int at = place.column * p.plan.vector + j * place.channel_step;
    mean[j] = coefficients.value[0][at];
    scale[j] = coefficients.value[1][at];
    shift[j] = coefficients.value[2][at] - (kHalf ? mean[j] * scale[j] : A(0));
  }
  const T* const x = static_cast<const T*>(p.x) + place.offset(p.x_strides);
  const T* const residual = static_cast<const T*>(p.residual) + place.offset(p.residual_strides);
  const BnActForwardPart& part = part_of(p, place.channel);
  const BnActStrides y_strides = part.y_strides;
  T* const y = static_cast<T*>(part.y) + place.offset(y_strides, part.first);
  const A slope = static_cast<A>(p.slope);
  // Walk backward, because the data that pass 1 read last is still in L2.
  Walk walk(p.plan, place.split, place.row, place.rows, true), behind = walk;
  const auto run = [&](auto with_residual) {
    constexpr int unroll = decltype(with_residual)::value ? kUnrollTwo : kUnroll;
    dispatch_activation(p.activation, [&](auto activation) {
      for (int k = 0; k < walk.count; k += unroll) {
        Vector<T, kVector> packs[unroll];
        [[maybe_unused]] Vector<T, kVector> residuals[unroll];
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
          if (k + u < walk.count) {
            packs[u] = load<kVector>(x + walk.offset(p.x_strides));
            if constexpr (decltype(with_residual)::value) {
              residuals[u] = load<kVector>(residual + walk.offset(p.residual_strides));
            }
          }
          walk.retreat();
        }
#pragma unroll
        for (int u = 0; u < unroll; ++u) {
          if (k + u < walk.count) {
            A value[kVector];
            unpack(packs[u], value);
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
              value[j] = activate<decltype(activation)::value, kHalf>(
                  normalized<kHalf>(value[j], mean[j], scale[j], shift[j]), slope);
              if constexpr (decltype(with_residual)::value) value[j] += to_arithmetic(residuals[u].x[j]);
            }
            *reinterpret_cast<Vector<T, kVector>*>(y + behind.offset(y_strides)) = packed<A, T>(value);
          }
          behind.retreat();
        }
      }
    });
  };
  p.residual ? run(std::true_type{}) : run(std::false_type{});
}

// Load the vector's values for a thread's elements, all of them before any is used.
template <typename A, int kVector>
__device__ __forceinline__ void load_channels(const BnActVector& vector, const Place& place, A otherwise,
                                              A (&out)[kVector]) {
  if (!vector.data) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) out[j] = otherwise;
    return;
  }
  dispatch(vector.dtype, [&](auto zero) {
    const auto* const from = static_cast<const decltype(zero)*>(vector.data) + place.channel;
#pragma unroll
    for (int j = 0; j < kVector; ++j) out[j] = static_cast<A>(to_arithmetic(from[j * place.channel_step]));
  });
}

template <typename T, int kVector>
__device__ __forceinline__ void load_next(const T* from, const BnActStrides& strides, int left, Walk walk,
                                          Vector<T, kVector> (&packs)[kEvalUnroll]) {
#pragma unroll
  for (int u = 0; u < kEvalUnroll; ++u) {
    if (u < left) packs[u] = load<kVector>(from + walk.offset(strides));
    walk.retreat();
  }
}

// The blocks, and each block within its part, go backward, because the data written last is still in L2.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads, kEvalBlocksPerSm) bn_act_eval(const __grid_constant__ BnActEvalParams p) {
  using A = arithmetic_t<T>;
  constexpr bool kHalf = sizeof(T) == 2;
  const unsigned slices = static_cast<unsigned>(p.plan.slices), group = blockIdx.x / slices;
  const Place place(p.plan, static_cast<int>(blockIdx.x - group * slices), p.plan.splits - 1 - static_cast<int>(group));
  if (!place.active) return;
  Walk walk(p.plan, place.split, place.row, place.rows, true);
  const T* const x = static_cast<const T*>(p.x) + place.offset(p.x_strides);
  const T* const residual = static_cast<const T*>(p.residual) + place.offset(p.residual_strides);
  T* const y = static_cast<T*>(p.y) + place.offset(p.y_strides);
  T* const last = static_cast<T*>(p.last) + place.offset(p.last_strides, p.last_first);
  const bool twice = p.last && place.channel >= p.last_first;
  const A slope = static_cast<A>(p.slope);
  Vector<T, kVector> packs[kEvalUnroll], residuals[kEvalUnroll];
  load_next(x, p.x_strides, walk.count, walk, packs);
  if (p.residual) load_next(residual, p.residual_strides, walk.count, walk, residuals);
  A mean[kVector], scale[kVector], shift[kVector];
  load_channels(p.bias, place, A(0), shift);
  load_channels(p.weight, place, A(1), scale);
  load_channels(p.mean, place, A(0), mean);
  if (p.variance.data) {
    A variance[kVector];
    load_channels(p.variance, place, A(0), variance);
#pragma unroll
    for (int j = 0; j < kVector; ++j) scale[j] /= sqrt(variance[j] + static_cast<A>(p.eps));
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) shift[j] -= kHalf ? mean[j] * scale[j] : A(0);
  dispatch_activation(p.activation, [&](auto activation) {
    for (int left = walk.count; left > 0; left -= kEvalUnroll) {
#pragma unroll
      for (int u = 0; u < kEvalUnroll; ++u) {
        if (u < left) {
          A value[kVector];
          unpack(packs[u], value);
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            value[j] = activate<decltype(activation)::value, kHalf>(
                normalized<kHalf>(value[j], mean[j], scale[j], shift[j]), slope);
          }
          if (p.residual) {
#pragma unroll
            for (int j = 0; j < kVector; ++j) value[j] += to_arithmetic(residuals[u].x[j]);
          }
          const Vector<T, kVector> result = packed<A, T>(value);
          *reinterpret_cast<Vector<T, kVector>*>(y + walk.offset(p.y_strides)) = result;
          if (twice) *reinterpret_cast<Vector<T, kVector>*>(last + walk.offset(p.last_strides)) = result;
        }
        walk.retreat();
      }
      load_next(x, p.x_strides, left - kEvalUnroll, walk, packs);
      if (p.residual) load_next(residual, p.residual_strides, left - kEvalUnroll, walk, residuals);
    }
  });
}

template <bool kBack, typename T, int kVector>
__device__ __forceinline__ void load_two(const BnActBackwardParams& p, const BnActStrides& grad_y_strides, const T* x,
                                         const T* grad_y, int k, Walk& walk, Vector<T, kVector> (&packs)[kUnrollTwo],
                                         Vector<T, kVector> (&grads)[kUnrollTwo]) {
#pragma unroll
  for (int u = 0; u < kUnrollTwo; ++u) {
    if (k + u < walk.count) {
      packs[u] = load<kVector>(x + walk.offset(p.x_strides));
      grads[u] = load<kVector>(grad_y + walk.offset(grad_y_strides));
    }
    kBack ? walk.retreat() : walk.advance();
  }
}

// Backward pass 1: sum dz and dz * (x - mean), where dz is the gradient at the activation's input.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    bn_act_backward_sums(const __grid_constant__ BnActBackwardParams p) {
  using A = arithmetic_t<T>;
  constexpr bool kHalf = sizeof(T) == 2;
  __shared__ BlockSums<A, kVector> sums;
  __shared__ Coefficients<A> coefficients;
  const Place place(p.plan);
  A first[kVector], second[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) first[j] = second[j] = A(0);
  const int64_t own = int64_t{place.slice} * p.plan.slice_channels + threadIdx.x;
  if (threadIdx.x < p.plan.slice_channels && own < p.plan.channels) {
    coefficients.value[0][threadIdx.x] = static_cast<const A*>(p.mean)[own];
    const BnActBackwardPart& part = part_of(p, own);
    coefficients.value[1][threadIdx.x] =
        static_cast<const A*>(p.invstd)[own] * load_vector(part.weight, own - part.first, A(1));
    coefficients.value[2][threadIdx.x] = load_vector(part.bias, own - part.first, A(0));
  }
  __syncthreads();
  if (place.active) {
    A mean[kVector], scale[kVector], shift[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int at = place.column * p.plan.vector + j * place.channel_step;
      mean[j] = coefficients.value[0][at];
      scale[j] = coefficients.value[1][at];
      shift[j] = coefficients.value[2][at];
    }
    const T* const x = static_cast<const T*>(p.x) + place.offset(p.x_strides);
    const BnActBackwardPart& part = part_of(p, place.channel);
    const BnActStrides grad_y_strides = part.grad_y_strides;
    const T* const grad_y = static_cast<const T*>(part.grad_y) + place.offset(grad_y_strides, part.first);
    const A slope = static_cast<A>(p.slope);
    Walk walk(p.plan, place.split, place.row, place.rows, false);
    dispatch_activation(p.activation, [&](auto activation) {
      for (int k = 0; k < walk.count; k += kUnrollTwo) {
        Vector<T, kVector> packs[kUnrollTwo], grads[kUnrollTwo];
        load_two<false>(p, grad_y_strides, x, grad_y, k, walk, packs, grads);
#pragma unroll
        for (int u = 0; u < kUnrollTwo; ++u) {
          if (k + u < walk.count) {
            A value[kVector], grad[kVector];
            unpack(packs[u], value);
            unpack(grads[u], grad);
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
              const A centered = value[j] - mean[j];
              const A dz =
                  activate_backward<decltype(activation)::value, kHalf>(centered * scale[j] + shift[j], grad[j], slope);
              first[j] += dz;
              second[j] += dz * centered;
            }
          }
        }
      }
    });
  }
  const Pair<A> sum = sums.reduce(p.plan, place, first, second);
  if (threadIdx.x < p.plan.slice_channels) store_partial(p.plan, place, p.partials, sum);
}

// Merge the partials of pass 1 into the parameters' gradients and the coefficients of pass 2 for the block's slice.
template <typename A, int kVector>
__device__ __forceinline__ void merge_gradients(const BnActBackwardParams& p, const Place& place,
                                                BlockSums<A, kVector>& sums, Coefficients<A>& coefficients) {
  const int channels = p.plan.slice_channels, groups = p.plan.groups;
  const int group = threadIdx.x / static_cast<unsigned>(channels), c = threadIdx.x - group * channels;
  Pair<A> sum =
      gather<A>(p.plan, place.slice, p.partials, groups, group, c, [](Pair<A>& total, int, const Pair<A>& part) {
        total.first += part.first;
        total.second += part.second;
      });
  sum = sums.fold(channels, groups, group, c, sum);
  const int64_t channel = int64_t{place.slice} * channels + c;
  if (group == 0 && channel < p.plan.channels) {
    const A n = static_cast<A>(p.plan.count());
    const BnActBackwardPart& part = part_of(p, channel);
    const int64_t own = channel - part.first;
    const A invstd = static_cast<const A*>(p.invstd)[channel];
    const A weight = load_vector(part.weight, own, A(1));
    // Store the mean of dz, and the mean of dz * xhat as a factor of x - mean.
    coefficients.value[0][c] = sum.first / n;
    coefficients.value[1][c] = sum.second / n * invstd * invstd;
    coefficients.value[2][c] = invstd * weight;
    coefficients.value[3][c] = load_vector(part.bias, own, A(0));
    coefficients.value[4][c] = static_cast<const A*>(p.mean)[channel];
    if (place.split == 0) {
      store_vector(part.grad_weight, own, sum.second * invstd);
      store_vector(part.grad_bias, own, sum.first);
    }
  }
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    bn_act_backward(const __grid_constant__ BnActBackwardParams p) {
  using A = arithmetic_t<T>;
  constexpr bool kHalf = sizeof(T) == 2;
  __shared__ BlockSums<A, kVector> sums;
  __shared__ Coefficients<A> coefficients;
  const Place place(p.plan);
  merge_gradients(p, place, sums, coefficients);
  __syncthreads();
  if (!place.active) return;
  A mean[kVector], scale[kVector], shift[kVector], mean_dz[kVector], slope_dz[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int at = place.column * p.plan.vector + j * place.channel_step;
    mean[j] = coefficients.value[4][at];
    mean_dz[j] = coefficients.value[0][at];
    slope_dz[j] = coefficients.value[1][at];
    scale[j] = coefficients.value[2][at];
    shift[j] = coefficients.value[3][at];
    if (kHalf) {
      shift[j] -= mean[j] * scale[j];
      slope_dz[j] *= scale[j];
      mean_dz[j] = mean_dz[j] * scale[j] - mean[j] * slope_dz[j];
    }
  }
  const T* const x = static_cast<const T*>(p.x) + place.offset(p.x_strides);
  const BnActBackwardPart& part = part_of(p, place.channel);
  const BnActStrides grad_y_strides = part.grad_y_strides;
  const T* const grad_y = static_cast<const T*>(part.grad_y) + place.offset(grad_y_strides, part.first);
  T* const grad_x = static_cast<T*>(p.grad_x) + place.offset(p.grad_x_strides);
  const A slope = static_cast<A>(p.slope);
  Walk walk(p.plan, place.split, place.row, place.rows, true), behind = walk;
  dispatch_activation(p.activation, [&](auto activation) {
    for (int k = 0; k < walk.count; k += kUnrollTwo) {
      Vector<T, kVector> packs[kUnrollTwo], grads[kUnrollTwo];
      load_two<true>(p, grad_y_strides, x, grad_y, k, walk, packs, grads);
#pragma unroll
      for (int u = 0; u < kUnrollTwo; ++u) {
        if (k + u < walk.count) {
          A value[kVector], grad[kVector];
          unpack(packs[u], value);
          unpack(grads[u], grad);
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            const A dz = activate_backward<decltype(activation)::value, kHalf>(
                normalized<kHalf>(value[j], mean[j], scale[j], shift[j]), grad[j], slope);
            value[j] = kHalf ? dz * scale[j] - (value[j] * slope_dz[j] + mean_dz[j])
                             : (dz - mean_dz[j] - (value[j] - mean[j]) * slope_dz[j]) * scale[j];
          }
          *reinterpret_cast<Vector<T, kVector>*>(grad_x + behind.offset(p.grad_x_strides)) = packed<A, T>(value);
        }
        behind.retreat();
      }
    }
  });
}

// Call f(blocks, zero of the type, constant of the access width), which launches the kernels.
template <typename Params, typename F>
cudaError_t dispatch_access(const Params& params, F&& f) {
  const auto grid = static_cast<unsigned>(params.plan.slices * params.plan.splits);
  return dispatch(params.dtype, [&](auto zero) {
    if (params.plan.vector > 1) {
      f(grid, zero, std::integral_constant<int, static_cast<int>(16 / sizeof(zero))>{});
    } else {
      f(grid, zero, std::integral_constant<int, 1>{});
    }
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t bn_act_blocks(int64_t& blocks) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  blocks = int64_t{processors} * kBlocksPerSm;
  return error;
}

cudaError_t launch_bn_act_forward(const BnActForwardParams& params, cudaStream_t stream) {
  return dispatch_access(params, [&](unsigned grid, auto zero, auto vector) {
    bn_act_statistics<decltype(zero), decltype(vector)::value><<<grid, kThreads, 0, stream>>>(params);
    bn_act_forward<decltype(zero), decltype(vector)::value><<<grid, kThreads, 0, stream>>>(params);
  });
}

cudaError_t launch_bn_act_backward(const BnActBackwardParams& params, cudaStream_t stream) {
  return dispatch_access(params, [&](unsigned grid, auto zero, auto vector) {
    bn_act_backward_sums<decltype(zero), decltype(vector)::value><<<grid, kThreads, 0, stream>>>(params);
    bn_act_backward<decltype(zero), decltype(vector)::value><<<grid, kThreads, 0, stream>>>(params);
  });
}

cudaError_t launch_bn_act_eval(const BnActEvalParams& params, cudaStream_t stream) {
  return dispatch_access(params, [&](unsigned grid, auto zero, auto vector) {
    bn_act_eval<decltype(zero), decltype(vector)::value><<<grid, kThreads, 0, stream>>>(params);
  });
}

}  // namespace torch_fastdet::core
