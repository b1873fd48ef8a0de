// The kernels of multi_tensor.h run a persistent grid of warps over the work list in device memory. Rows whose tensors
// share a type and a layout are read 16 bytes at a time (element by element for unaligned storage and for tails); other
// rows are read element by element through their own types and strides.
#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/multi_tensor/multi_tensor.h"
#include "core/multi_tensor/multi_tensor_plan.h"
#include "core/multi_tensor/optimizer_math.h"

namespace torch_fastdet::core {
namespace {

constexpr int kThreads = kWarp * kWarpsPerBlock;

// Return a value as a tensor of this type would store it.
template <typename A>
__device__ __forceinline__ A stored_any(DType dtype, A value) {
  return dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    return static_cast<A>(Storage<T>::round(static_cast<arithmetic_t<T>>(value)));
  });
}

__device__ __forceinline__ double read(const Scalar& scalar) {
  return scalar.data ? load_element<double>(scalar.data, scalar.dtype, 0) : scalar.value;
}

// Return whether all tensors of the row share a type and a layout. With `narrow_second`, kSecond must be bfloat16.
__device__ __forceinline__ bool is_uniform(const Row& row, bool narrow_second, DType& type) {
  bool first = true, uniform = row.layout < 0;
  for (int slot = 0; slot < kSlots; ++slot) {
    if (!row.data[slot]) continue;
    if (narrow_second && slot == kSecond) {
      uniform = uniform && slot_type(row, slot) == DType::kBFloat16;
      continue;
    }
    if (first) type = slot_type(row, slot);
    uniform = uniform && slot_type(row, slot) == type;
    first = false;
  }
  return uniform;
}

// Return true in the block of the grid that arrives last and sees all other blocks' writes. Reset the ticket to zero.
__device__ __forceinline__ bool is_last_block(Workspace* workspace) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&workspace->ticket, 1u) == gridDim.x - 1;
    if (last) workspace->ticket = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

template <typename A>
struct GradSum {
  A sum = 0;
  bool finite = true;
  // `as_grad` rounds to the gradient's own type: the norm is that of the values that are, or would be, stored.
  template <typename AsGrad>
  __device__ __forceinline__ A add(A grad, A inv_scale, bool scaled, const AsGrad& as_grad) {
    finite = finite && isfinite(grad);
    if (scaled) grad = as_grad(mul_rn(grad, inv_scale));
    sum += grad * grad;
    return grad;
  }
};

template <typename T>
__device__ double reduce_typed(T* __restrict__ grad, int count, float inv_scale, bool scaled, bool write, int lane,
                               bool& finite) {
  using A = arithmetic_t<T>;
  constexpr int V = Vector<T>::kSize;
  constexpr int U = 4;
  const auto as_grad = [](A x) { return Storage<T>::round(x); };
  GradSum<A> sum;
  int done = 0;
  if (is_vector_aligned(grad)) {
    const int vectors = count / V;
    Vector<T>* in = reinterpret_cast<Vector<T>*>(grad);
    for (int first = lane; first < vectors; first += kWarp * U) {
      Vector<T> x[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (first + u * kWarp < vectors) x[u] = in[first + u * kWarp];
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (first + u * kWarp >= vectors) continue;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const A value = sum.add(to_arithmetic(x[u].x[v]), static_cast<A>(inv_scale), scaled, as_grad);
          x[u].x[v] = from_arithmetic<T>(value);
        }
        if (write) in[first + u * kWarp] = x[u];
      }
    }
    done = vectors * V;
  }
  for (int i = done + lane; i < count; i += kWarp) {
    const A x = sum.add(to_arithmetic(grad[i]), static_cast<A>(inv_scale), scaled, as_grad);
    if (write) grad[i] = from_arithmetic<T>(x);
  }
  finite = finite && sum.finite;
  return warp_sum(sum.sum);
}

template <typename A>
__device__ double reduce_any(const Row& row, const Layout* layouts, const Segment& segment, float inv_scale,
                             bool scaled, bool write, int lane, bool& finite) {
  GradSum<A> sum;
  for (int i = lane; i < segment.count; i += kWarp) {
    int64_t offsets[kSlots];
    offsets[kGrad] = segment.start + i;
    if (row.layout >= 0) layout_offsets(layouts[row.layout], segment.start + i, offsets);
    const DType type = slot_type(row, kGrad);
    const A x = sum.add(load_element<A>(row.data[kGrad], type, offsets[kGrad]), static_cast<A>(inv_scale), scaled,
                        [type](A value) { return stored_any(type, value); });
    if (write) store_element(row.data[kGrad], type, offsets[kGrad], x);
  }
  finite = finite && sum.finite;
  return warp_sum(sum.sum);
}

template <bool kFloat32>
__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ ReduceParams p) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const bool scaled = p.scale != nullptr;
  const float inv_scale = scaled ? inverse_scale(*p.scale) : 1.f;
  double sum = 0;
  bool finite = true;
  for (int64_t s = int64_t(blockIdx.x) * kWarpsPerBlock + warp; s < p.list.num_segments;
       s += int64_t(gridDim.x) * kWarpsPerBlock) {
    const Segment segment = p.list.segments[s];
    const Row& row = p.list.rows[segment.row];
    void* grad = row.data[kGrad];
    if (!grad) continue;
    const auto typed = [&](auto zero) {
      using T = decltype(zero);
      return reduce_typed(static_cast<T*>(grad) + segment.start, segment.count, inv_scale, scaled, p.write_grads, lane,
                          finite);
    };
    if (kFloat32) {
      sum += typed(float{});
    } else if (row.layout >= 0) {
      sum += has_double(row)
                 ? reduce_any<double>(row, p.list.layouts, segment, inv_scale, scaled, p.write_grads, lane, finite)
                 : reduce_any<float>(row, p.list.layouts, segment, inv_scale, scaled, p.write_grads, lane, finite);
    } else {
      sum += dispatch(slot_type(row, kGrad), typed);
    }
  }
  if (!__all_sync(kFullWarp, finite) && lane == 0) atomicOr(&p.list.workspace->nonfinite, 1u);
  const double block = sum_of_warps<kWarpsPerBlock>(sum);
  if (threadIdx.x == 0) p.list.partials[blockIdx.x] = block;
  if (!is_last_block(p.list.workspace)) return;
  double total = 0;
  for (int i = threadIdx.x; i < gridDim.x; i += kThreads) total += __ldcg(p.list.partials + i);
  total = sum_of_warps<kWarpsPerBlock>(warp_sum(total));
  if (threadIdx.x != 0) return;
  Workspace& w = *p.list.workspace;
  finish_reduction(p, w, atomicExch(&w.nonfinite, 0u) != 0, total);
}

// These rules say how a parameter moves. `second` is kSecond's value, a Second<T>. kUnroll vectors are in flight.
template <typename A>
struct SgdRule {
  static constexpr bool kWritesParam = true, kSecondRead = false, kSecondWritten = false;
  static constexpr int kUnroll = 2;
  template <typename T>
  using Second = T;
  SgdScalars<A> sgd;
  bool momentum, unfilled;

  __device__ __forceinline__ void read_group(const Group& g, const Row& row, bool is_unfilled, bool always = false) {
    sgd.lr = static_cast<A>(read(g.lr));
    sgd.momentum = static_cast<A>(read(g.momentum));
    sgd.one_minus_dampening = static_cast<A>(1.0 - read(g.dampening));
    sgd.weight_decay = static_cast<A>(read(g.weight_decay));
    sgd.nesterov = g.nesterov;
    sgd.maximize = g.maximize;
    momentum = row.data[kMomentum] && (always || sgd.momentum != A(0));
    unfilled = is_unfilled;
  }
  __device__ __forceinline__ bool has_second() const { return false; }
  __device__ __forceinline__ void apply(A& param, A grad, A& buffer, A&) const {
    sgd_element(param, grad, buffer, sgd, momentum, unfilled);
  }
};

template <typename A>
struct MovedSgdRule : SgdRule<A> {
  static constexpr bool kSecondRead = true;
  static constexpr int kUnroll = 1;
  A along;
  bool moves;

  __device__ __forceinline__ void read_group(const Group& g, const Row& row, bool is_unfilled) {
    SgdRule<A>::read_group(g, row, is_unfilled, true);  // MuSGD writes the buffer where its momentum is 0, too
    moves = row.data[kSecond] != nullptr;
    along = static_cast<A>(read(g.last));
  }
  __device__ __forceinline__ bool has_second() const { return moves; }
  __device__ __forceinline__ void apply(A& param, A grad, A& buffer, A& second) const {
    if (moves) param = fused_mul_add(along, second, param);
    SgdRule<A>::apply(param, grad, buffer, second);
  }
};

template <typename A>
struct AdamRule {
  static constexpr bool kWritesParam = true, kSecondRead = true, kSecondWritten = true;
  static constexpr int kUnroll = 1;
  template <typename T>
  using Second = T;
  AdamScalars<A> adam;
  bool momentum;

  __device__ __forceinline__ void read_group(const Group& g, const Row& row, bool) {
    momentum = true;
    adam = adam_scalars<A>(read(g.lr), read(g.momentum), read(g.dampening), read(g.weight_decay), read(g.last),
                           g.decoupled, g.maximize, static_cast<double>(*row.step) + 1.0);
  }
  __device__ __forceinline__ bool has_second() const { return true; }
  __device__ __forceinline__ void apply(A& param, A grad, A& buffer, A& second) const {
    adam_element(param, grad, buffer, second, adam);
  }
};

template <typename A>
struct MuonRule {
  static constexpr bool kWritesParam = false, kSecondRead = false, kSecondWritten = true;
  static constexpr int kUnroll = 2;
  template <typename T>
  using Second = __nv_bfloat16;
  A factor, rest;
  bool momentum, nesterov;

  __device__ __forceinline__ void read_group(const Group& g, const Row&, bool) {
    momentum = true;
    factor = static_cast<A>(read(g.momentum));
    rest = static_cast<A>(1.0 - read(g.momentum));
    nesterov = g.nesterov;
  }
  __device__ __forceinline__ bool has_second() const { return true; }
  __device__ __forceinline__ void apply(A&, A grad, A& buffer, A& second) const {
    second = muon_element(grad, buffer, factor, rest, nesterov);
  }
};

template <typename A, template <typename> class R>
struct RowStep {
  R<A> rule;
  A inv_scale, clip, decay, one_minus_decay;
  bool scaled, clipped, update, write_grad, average;

  // `as_grad` and `as_param` round to the tensor's own type where separate calls would store and load values.
  template <typename AsGrad, typename AsParam>
  __device__ __forceinline__ void element(A& param, A& grad, A& buffer, A& second, A& average_value,
                                          const AsGrad& as_grad, const AsParam& as_param) const {
    if (scaled) grad = as_grad(mul_rn(grad, inv_scale));
    if (clipped) grad = as_grad(mul_rn(grad, clip));
    if (update) {
      rule.apply(param, grad, buffer, second);
      param = as_param(param);
    }
    if (average) average_value = ema_element(average_value, param, decay, one_minus_decay);
  }
  __device__ __forceinline__ bool reads_grad() const { return update || write_grad; }
};

// Hold as many values of a second tensor, possibly of a narrower type, as a Vector<T> holds.
template <typename S, int N>
struct alignas(sizeof(S) * N) Several {
  S x[N];
};

template <typename T, int U, template <typename> class R>
__device__ void update_typed(const Row& row, int64_t start, int count, const RowStep<arithmetic_t<T>, R>& step,
                             int lane) {
  using A = arithmetic_t<T>;
  using Rule = R<A>;
  using S = typename Rule::template Second<T>;
  constexpr int V = Vector<T>::kSize;
  using Seconds = Several<S, V>;
  const auto as_stored = [](A x) { return Storage<T>::round(x); };
  T* param = row.data[kParam] ? static_cast<T*>(row.data[kParam]) + start : nullptr;
  T* grad = step.reads_grad() ? static_cast<T*>(row.data[kGrad]) + start : nullptr;
  T* buffer = step.update && step.rule.momentum ? static_cast<T*>(row.data[kMomentum]) + start : nullptr;
  S* second = step.update && step.rule.has_second() ? static_cast<S*>(row.data[kSecond]) + start : nullptr;
  T* average = step.average ? static_cast<T*>(row.data[kAverage]) + start : nullptr;
  const bool reads_second = Rule::kSecondRead && second;
  int done = 0;
  if (is_vector_aligned(param) && is_vector_aligned(grad) && is_vector_aligned(buffer) && is_vector_aligned(average) &&
      reinterpret_cast<uintptr_t>(second) % sizeof(Seconds) == 0) {
    const int vectors = count / V;
    for (int first = lane; first < vectors; first += kWarp * U) {
      Vector<T> p[U], g[U], m[U], e[U];
      Seconds v2[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int i = first + u * kWarp;
        if (i >= vectors) continue;
        if (param) p[u] = reinterpret_cast<const Vector<T>*>(param)[i];
        if (grad) g[u] = reinterpret_cast<const Vector<T>*>(grad)[i];
        if (buffer) m[u] = reinterpret_cast<const Vector<T>*>(buffer)[i];
        if (reads_second) v2[u] = reinterpret_cast<const Seconds*>(second)[i];
        if (average) e[u] = reinterpret_cast<const Vector<T>*>(average)[i];
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int i = first + u * kWarp;
        if (i >= vectors) continue;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          A pv = param ? to_arithmetic(p[u].x[v]) : A(0);
          A gv = grad ? to_arithmetic(g[u].x[v]) : A(0);
          A mv = buffer ? to_arithmetic(m[u].x[v]) : A(0);
          A sv = reads_second ? static_cast<A>(to_arithmetic(v2[u].x[v])) : A(0);
          A ev = average ? to_arithmetic(e[u].x[v]) : A(0);
          step.element(pv, gv, mv, sv, ev, as_stored, as_stored);
          p[u].x[v] = from_arithmetic<T>(pv);
          g[u].x[v] = from_arithmetic<T>(gv);
          m[u].x[v] = from_arithmetic<T>(mv);
          if constexpr (Rule::kSecondWritten) v2[u].x[v] = from_arithmetic<S>(static_cast<arithmetic_t<S>>(sv));
          e[u].x[v] = from_arithmetic<T>(ev);
        }
        if (Rule::kWritesParam && step.update) reinterpret_cast<Vector<T>*>(param)[i] = p[u];
        if (step.write_grad) reinterpret_cast<Vector<T>*>(grad)[i] = g[u];
        if (buffer) reinterpret_cast<Vector<T>*>(buffer)[i] = m[u];
        if (Rule::kSecondWritten && second) reinterpret_cast<Seconds*>(second)[i] = v2[u];
        if (average) reinterpret_cast<Vector<T>*>(average)[i] = e[u];
      }
    }
    done = vectors * V;
  }
  for (int i = done + lane; i < count; i += kWarp) {
    A pv = param ? to_arithmetic(param[i]) : A(0);
    A gv = grad ? to_arithmetic(grad[i]) : A(0);
    A mv = buffer ? to_arithmetic(buffer[i]) : A(0);
    A sv = reads_second ? static_cast<A>(to_arithmetic(second[i])) : A(0);
    A ev = average ? to_arithmetic(average[i]) : A(0);
    step.element(pv, gv, mv, sv, ev, as_stored, as_stored);
    if (Rule::kWritesParam && step.update) param[i] = from_arithmetic<T>(pv);
    if (step.write_grad) grad[i] = from_arithmetic<T>(gv);
    if (buffer) buffer[i] = from_arithmetic<T>(mv);
    if (Rule::kSecondWritten && second) second[i] = from_arithmetic<S>(static_cast<arithmetic_t<S>>(sv));
    if (average) average[i] = from_arithmetic<T>(ev);
  }
}

template <typename A, template <typename> class R>
__device__ void update_any(const Row& row, const Layout* layouts, const Segment& segment, const RowStep<A, R>& step,
                           int lane) {
  const bool momentum = step.update && step.rule.momentum;
  const bool second = step.update && step.rule.has_second();
  for (int i = lane; i < segment.count; i += kWarp) {
    int64_t at[kSlots];
    for (int slot = 0; slot < kSlots; ++slot) at[slot] = segment.start + i;
    if (row.layout >= 0) layout_offsets(layouts[row.layout], segment.start + i, at);
    const auto load = [&](bool wanted, int slot) {
      return wanted ? load_element<A>(row.data[slot], slot_type(row, slot), at[slot]) : A(0);
    };
    const auto store = [&](bool wanted, int slot, A value) {
      if (wanted) store_element(row.data[slot], slot_type(row, slot), at[slot], value);
    };
    A pv = load(row.data[kParam] != nullptr, kParam);
    A gv = load(step.reads_grad(), kGrad);
    A mv = load(momentum, kMomentum);
    A sv = load(second && R<A>::kSecondRead, kSecond);
    A ev = load(step.average, kAverage);
    step.element(
        pv, gv, mv, sv, ev, [&row](A x) { return stored_any(slot_type(row, kGrad), x); },
        [&row](A x) { return stored_any(slot_type(row, kParam), x); });
    store(R<A>::kWritesParam && step.update, kParam, pv);
    store(step.write_grad, kGrad, gv);
    store(momentum, kMomentum, mv);
    store(second && R<A>::kSecondWritten, kSecond, sv);
    store(step.average, kAverage, ev);
  }
}

template <typename A, template <typename> class R>
__device__ __forceinline__ RowStep<A, R> row_step(const UpdateParams& p, const StepScalars& s, const Row& row,
                                                  int32_t index) {
  RowStep<A, R> step{};
  const int32_t group = row.group - p.first_group;
  const bool steps = p.rule != Rule::kNone;
  const bool has_grad = row.data[kGrad] && !s.skip;
  step.update = steps && has_grad && row.group >= 0 && group >= 0 && group < p.num_groups;
  step.write_grad = p.write_grads && has_grad && (!steps || step.update);
  step.average = p.ema && row.data[kAverage] &&
                 (!steps || row.group < 0 ? p.first_group == 0 : group >= 0 && group < p.num_groups);
  step.scaled = s.scaled;
  step.clipped = s.clipped;
  step.inv_scale = static_cast<A>(s.inv_scale);
  step.clip = static_cast<A>(s.clip);
  step.decay = static_cast<A>(s.decay);
  step.one_minus_decay = static_cast<A>(s.one_minus_decay);
  if (step.update) step.rule.read_group(p.groups[group], row, p.first_step || (p.unfilled && p.unfilled[index]));
  return step;
}

// Change what other blocks have read in this launch: whether a buffer is initialized and how many steps were taken.
__device__ void finish_rows(const UpdateParams& p) {
  for (int64_t i = threadIdx.x; i < p.list.num_rows; i += kThreads) {
    const Row& row = p.list.rows[i];
    const int32_t group = row.group - p.first_group;
    if (group >= 0 && group < p.num_groups) finish_row(p, row, i);
  }
}

template <bool kFloat32, template <typename> class R>
__global__ void __launch_bounds__(kThreads, kFloat32 ? 3 : 1) update_kernel(const __grid_constant__ UpdateParams p) {
  __shared__ StepScalars shared;
  __shared__ int64_t updates;
  if (threadIdx.x == 0) {
    const Workspace& w = *p.list.workspace;
    updates = p.ema && p.updates < 0 ? *p.counter + 1 : p.updates;
    shared = step_scalars(p, w, p.ema ? read(p.decay) : 0, updates);
  }
  __syncthreads();
  const StepScalars s = shared;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int64_t i = int64_t(blockIdx.x) * kWarpsPerBlock + warp; i < p.list.num_segments;
       i += int64_t(gridDim.x) * kWarpsPerBlock) {
    const Segment segment = p.list.segments[i];
    const Row row = p.list.rows[segment.row];
    const auto typed = [&](auto zero) {
      using T = decltype(zero);
      const auto step = row_step<arithmetic_t<T>, R>(p, s, row, segment.row);
      if (!step.reads_grad() && !step.average) return;
      update_typed<T, sizeof(T) == 2 ? 1 : R<arithmetic_t<T>>::kUnroll, R>(row, segment.start, segment.count, step,
                                                                           lane);
    };
    if (kFloat32) {
      typed(float{});
      continue;
    }
    constexpr bool kNarrow = std::is_same_v<typename R<float>::template Second<float>, __nv_bfloat16>;
    DType type = DType::kFloat32;
    if (!is_uniform(row, kNarrow, type)) {
      if (has_double(row)) {
        update_any(row, p.list.layouts, segment, row_step<double, R>(p, s, row, segment.row), lane);
      } else {
        update_any(row, p.list.layouts, segment, row_step<float, R>(p, s, row, segment.row), lane);
      }
      continue;
    }
    dispatch(type, typed);
  }
  // Blocks read these values above, so nothing may change them before the last block has finished.
  if (!p.unfilled && !p.write_counter && p.rule != Rule::kAdam) return;
  if (!is_last_block(p.list.workspace)) return;
  if (p.rule != Rule::kNone && !s.skip) finish_rows(p);
  if (p.write_counter && threadIdx.x == 0) *p.counter = updates;
}

int blocks(const MultiTensor& list, int per_multiprocessor) {
  const int64_t needed = ceil_div(list.num_segments, kWarpsPerBlock);
  const int64_t resident = int64_t(list.multiprocessors) * per_multiprocessor;
  const int64_t most = resident < kMaxBlocks ? resident : kMaxBlocks;
  return static_cast<int>(needed < 1 ? 1 : needed < most ? needed : most);
}

}  // namespace

cudaError_t multi_tensor_reduce(const ReduceParams& params, cudaStream_t stream) {
  const auto kernel = params.list.float32_only ? reduce_kernel<true> : reduce_kernel<false>;
  kernel<<<blocks(params.list, 8), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

namespace {

template <template <typename> class R>
cudaError_t launch_update(const UpdateParams& params, cudaStream_t stream) {
  const auto kernel = params.list.float32_only ? update_kernel<true, R> : update_kernel<false, R>;
  kernel<<<blocks(params.list, params.list.float32_only ? 3 : 2), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t multi_tensor_update(const UpdateParams& params, cudaStream_t stream) {
  if (params.rule == Rule::kAdam) return launch_update<AdamRule>(params, stream);
  if (params.rule == Rule::kMuon) return launch_update<MuonRule>(params, stream);
  if (params.rule == Rule::kMovedSgd) return launch_update<MovedSgdRule>(params, stream);
  return launch_update<SgdRule>(params, stream);
}

}  // namespace torch_fastdet::core
