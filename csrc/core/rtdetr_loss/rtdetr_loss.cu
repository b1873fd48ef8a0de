// Forward launches four kernels (costs, assignment, sums of terms, the loss), backward one. Sums have a fixed order.
#include "core/rtdetr_loss/rtdetr_loss.h"

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/linear_assignment/linear_assignment.h"
#include "core/rtdetr_loss/rtdetr_loss_math.h"

namespace torch_fastdet::core {
namespace {

constexpr int kThreads = 256;
constexpr int kCostThreads = 128;
constexpr int kTargetBlocks = 8;  // blocks that share an image's targets

template <typename A>
__device__ __forceinline__ void load_box(const void* boxes, int64_t at, A (&box)[4]) {
  const Vector<A, 4> values = static_cast<const Vector<A, 4>*>(boxes)[at];
#pragma unroll
  for (int i = 0; i < 4; ++i) box[i] = values.x[i];
}

// Each thread takes a query and loops over its targets.
template <typename T>
__global__ void __launch_bounds__(kCostThreads) rtdetr_costs(const __grid_constant__ RtdetrLossParams p) {
  using A = arithmetic_t<T>;
  const int64_t query = blockIdx.x * kCostThreads + threadIdx.x, queries = p.assigned.queries;
  if (query >= queries) return;
  const A gains[3] = {A(p.costs[0]), A(p.costs[1]), A(p.costs[2])};
  for (int64_t problem = blockIdx.y; problem < p.assigned.sets * p.images; problem += gridDim.y) {
    const int64_t image = problem % p.images, count = p.count(image);
    const T* const scores = static_cast<const T*>(p.assigned.scores) + (problem * queries + query) * p.classes;
    A box[4], target[4];
    load_box(p.assigned.boxes, problem * queries + query, box);
    for (int64_t t = blockIdx.z; t < count; t += gridDim.z) {
      p.target_box(image, t, target);
      const int32_t label = p.class_of(image, t);
      const A class_cost = label < 0 ? A(0) : rtdetr_class_cost(to_arithmetic(scores[label]));
      static_cast<A*>(p.cost)[(problem * p.most + t) * queries + query] = rtdetr_cost(box, class_cost, target, gains);
    }
  }
}

// Each block takes a part of a set and image; it assigns targets to queries and sums their terms.
template <typename T>
__global__ void __launch_bounds__(kThreads) rtdetr_terms(const __grid_constant__ RtdetrLossParams p) {
  using A = arithmetic_t<T>;
  __shared__ int32_t owners[kRtdetrChunk], labels[kRtdetrChunk];
  __shared__ A qualities[kRtdetrChunk];
  const RtdetrPart part = rtdetr_part(p, blockIdx.x);
  const int64_t queries = part.sets->queries, count = p.count(part.image);
  const int64_t at = part.problem * queries + part.first;
  bool targets = false;
  for (int64_t image = threadIdx.x; image < p.images; image += kThreads) targets = targets || p.count(image) > 0;
  if (threadIdx.x < kRtdetrChunk) owners[threadIdx.x] = -1;
  const A alpha = A(__syncthreads_or(targets) ? kRtdetrAlpha : kRtdetrAlphaWithoutTargets);
  if (part.noisy) {
    if (threadIdx.x < part.count) {
      const int64_t t = p.matches[part.image * queries + part.first + threadIdx.x];
      if (t >= 0 && t < count) owners[threadIdx.x] = static_cast<int32_t>(t);
    }
  } else {
    for (int64_t t = threadIdx.x; t < count; t += kThreads) {
      const int64_t i = p.rows[part.problem * p.most + t] - part.first;
      if (i >= 0 && i < part.count) owners[i] = static_cast<int32_t>(t);
    }
  }
  __syncthreads();
  A sums[4] = {};
  if (threadIdx.x < part.count) {
    const int32_t owner = owners[threadIdx.x];
    int32_t label = -1;
    A quality = 0;
    if (owner >= 0) {
      A box[4], target[4];
      p.target_box(part.image, owner, target);
      load_box(part.sets->boxes, at + threadIdx.x, box);
      const IouTerms<A> overlap = rtdetr_overlap(box, target);
      quality = overlap.iou;
      label = p.class_of(part.image, owner);
      sums[1] = rtdetr_distance(box, target);
      sums[2] = A(1) - overlap.value;
      sums[3] = 1;
    }
    labels[threadIdx.x] = label;
    qualities[threadIdx.x] = quality;
    p.owner[part.place + threadIdx.x] = owner;
    static_cast<A*>(p.quality)[part.place + threadIdx.x] = quality;
  }
  __syncthreads();
  const T* const scores = static_cast<const T*>(part.sets->scores) + at * p.classes;
  const int classes = static_cast<int>(p.classes), numbers = static_cast<int>(part.count) * classes;
  for (int i = threadIdx.x; i < numbers; i += kThreads) {
    const A logit = to_arithmetic(scores[i]);
    const int query = i / classes;
    sums[0] +=
        i - query * classes == labels[query] ? rtdetr_positive(logit, qualities[query]) : rtdetr_negative(logit, alpha);
  }
  block_sum<kThreads>(sums);
  if (threadIdx.x == 0) {
    static_cast<Vector<A, 4>*>(p.partials)[blockIdx.x] = {sums[0], sums[1], sums[2], sums[3]};
  }
}

// Run in a single block: each warp adds the parts of a set. The block also counts bad targets.
template <typename T>
__global__ void __launch_bounds__(kThreads) rtdetr_total(const __grid_constant__ RtdetrLossParams p) {
  using A = arithmetic_t<T>;
  __shared__ unsigned long long faults, first_fault;
  if (threadIdx.x == 0) faults = first_fault = 0;
  bool targets = false;
  for (int64_t image = threadIdx.x; image < p.images; image += kThreads) targets = targets || p.count(image) > 0;
  const bool any = __syncthreads_or(targets);
  for (int64_t i = threadIdx.x; i < p.images * (p.most + 1); i += kThreads) {
    const int64_t image = i / (p.most + 1), row = i % (p.most + 1);
    const bool bad = row == p.most ? p.counts[image] < 0 || p.counts[image] > p.most
                                   : row < p.count(image) && p.class_of(image, row) < 0;
    if (!bad) continue;
    atomicAdd(&faults, 1ull);
    atomicMax(&first_fault, static_cast<unsigned long long>(rtdetr_fault_code(image, row, p.most)));
  }
  const int lane = threadIdx.x % kWarp;
  A* const terms = static_cast<A*>(p.terms);
  for (int64_t set = threadIdx.x / kWarp; set < p.sets(); set += kThreads / kWarp) {
    const bool noisy = set >= p.assigned.sets;
    const int64_t parts = p.images * (noisy ? p.noisy : p.assigned).chunks();
    const int64_t first =
        noisy ? p.images * p.assigned.sets * p.assigned.chunks() + (set - p.assigned.sets) * parts : set * parts;
    A sums[4] = {};
    for (int64_t i = lane; i < parts; i += kWarp) {
      const Vector<A, 4> partial = static_cast<const Vector<A, 4>*>(p.partials)[first + i];
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[k] += partial.x[k];
    }
    warp_sum(sums);
    if (lane > 0) continue;
    A* const scales = static_cast<A*>(p.scales) + 4 * set;
    for (int k = 0; k < 3; ++k) {
      scales[k] = A(p.gains[k]) / (sums[3] > A(1) ? sums[3] : A(1));
      terms[3 * set + k] = scales[k] * sums[k];
    }
    scales[3] = A(any ? kRtdetrAlpha : kRtdetrAlphaWithoutTargets);
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  A loss = 0;
  for (int64_t i = 0; i < 3 * p.sets(); ++i) loss += terms[i];
  *static_cast<A*>(p.loss) = loss;
  p.status[0] = static_cast<int64_t>(faults);
  p.status[1] = static_cast<int64_t>(first_fault);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rtdetr_gradient(const __grid_constant__ RtdetrLossParams p) {
  using A = arithmetic_t<T>;
  __shared__ int32_t labels[kRtdetrChunk];
  __shared__ A qualities[kRtdetrChunk];
  const RtdetrPart part = rtdetr_part(p, blockIdx.x);
  const int64_t at = part.problem * part.sets->queries + part.first;
  const A grad = *static_cast<const A*>(p.grad_loss);
  const A* const scales = static_cast<const A*>(p.scales) + 4 * part.set;
  if (threadIdx.x < part.count) {
    const int32_t owner = p.owner_of(part.place + threadIdx.x);
    labels[threadIdx.x] = owner < 0 ? -1 : p.class_of(part.image, owner);
    qualities[threadIdx.x] = static_cast<const A*>(p.quality)[part.place + threadIdx.x];
    A by_box[4] = {};
    if (owner >= 0) {
      A box[4], target[4];
      p.target_box(part.image, owner, target);
      load_box(part.sets->boxes, at + threadIdx.x, box);
      rtdetr_box_gradient(box, target, grad * scales[1], grad * scales[2], by_box);
    }
    static_cast<Vector<A, 4>*>(part.sets->grad_boxes)[at + threadIdx.x] = {by_box[0], by_box[1], by_box[2], by_box[3]};
  }
  __syncthreads();
  const A scale = grad * scales[0], alpha = scales[3];
  const T* const scores = static_cast<const T*>(part.sets->scores) + at * p.classes;
  T* const out = static_cast<T*>(part.sets->grad_scores) + at * p.classes;
  const int classes = static_cast<int>(p.classes), numbers = static_cast<int>(part.count) * classes;
  for (int i = threadIdx.x; i < numbers; i += kThreads) {
    const A logit = to_arithmetic(scores[i]);
    const int query = i / classes;
    out[i] = from_arithmetic<T>(scale * (i - query * classes == labels[query]
                                             ? rtdetr_positive_gradient(logit, qualities[query])
                                             : rtdetr_negative_gradient(logit, alpha)));
  }
}

}  // namespace

cudaError_t launch_rtdetr_loss(const RtdetrLossParams& p, cudaStream_t stream) {
  return dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t problems = p.assigned.sets * p.images;
    cudaError_t error = cudaSuccess;
    if (problems > 0 && p.most > 0) {
      if (p.assigned.queries > 0) {
        const dim3 grid(static_cast<unsigned>(ceil_div(p.assigned.queries, kCostThreads)),
                        static_cast<unsigned>(problems < 65535 ? problems : 65535),
                        static_cast<unsigned>(p.most < kTargetBlocks ? p.most : kTargetBlocks));
        rtdetr_costs<T><<<grid, kCostThreads, 0, stream>>>(p);
        error = cudaGetLastError();
      }
      LinearAssignmentParams assignment{};
      assignment.problems = problems;
      assignment.rows = p.assigned.queries;
      assignment.columns = p.most;
      assignment.problem_stride = p.most * p.assigned.queries;
      assignment.row_stride = 1;
      assignment.column_stride = p.assigned.queries;
      assignment.cost = p.cost;
      assignment.dtype = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
      assignment.used_columns = p.counts;
      assignment.period = p.images;
      assignment.out = p.rows;
      assignment.scratch = p.assignment;
      if (error == cudaSuccess) error = launch_linear_assignment(assignment, stream);
    }
    if (error == cudaSuccess && p.blocks() > 0) {
      rtdetr_terms<T><<<static_cast<unsigned>(p.blocks()), kThreads, 0, stream>>>(p);
      error = cudaGetLastError();
    }
    if (error != cudaSuccess) return error;
    rtdetr_total<T><<<1, kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

cudaError_t launch_rtdetr_loss_backward(const RtdetrLossParams& p, cudaStream_t stream) {
  if (p.blocks() == 0) return cudaSuccess;
  return dispatch(p.dtype, [&](auto zero) {
    rtdetr_gradient<decltype(zero)><<<static_cast<unsigned>(p.blocks()), kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace torch_fastdet::core
