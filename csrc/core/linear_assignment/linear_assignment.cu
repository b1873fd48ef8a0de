// Solve one problem per warp. A step examines all ends at once, with the result of linear_assignment_loops.h.
#include "core/linear_assignment/linear_assignment.h"

#include "core/common/device.cuh"
#include "core/common/exact_math.h"

namespace torch_fastdet::core {
namespace {

// This many ends of a lane are in registers, for up to 320 and 960 ends of a problem. More ends are in memory.
constexpr int kFewEnds = 10, kManyEnds = 30;
static_assert(kManyEnds * kWarp == kMostRegisterEnds);

// Hold the ends of a lane. End k of lane i has number 32 k + i.
template <typename T, int kEnds>
struct PerEnd {
  T x[kEnds];
  __device__ explicit PerEnd(unsigned char*&, int64_t) {}
  __device__ __forceinline__ T& operator[](int k) { return x[k]; }
};
template <typename T>
struct PerEnd<T, 0> {
  T* x;
  __device__ PerEnd(unsigned char*& room, int64_t count) : x(reinterpret_cast<T*>(room) + threadIdx.x) {
    room += count * kWarp * sizeof(T);
  }
  __device__ __forceinline__ T& operator[](int k) { return x[static_cast<int64_t>(k) * kWarp]; }
};

__device__ __forceinline__ unsigned warp_min(unsigned x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_min_sync(kFullWarp, x);
#else
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const unsigned other = __shfl_xor_sync(kFullWarp, x, step);
    x = other < x ? other : x;
  }
  return x;
#endif
}

// Map values to integers of the same order. -0 and 0 are equal.
__device__ __forceinline__ unsigned long long in_order(double x) {
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(x + 0.));
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}
__device__ __forceinline__ double from_order(unsigned long long bits) {
  return __longlong_as_double(static_cast<long long>(bits >> 63 ? bits & ~(1ull << 63) : ~bits));
}

constexpr int kStartBytes = sizeof(double) + sizeof(int);

template <typename T, int kEnds>
__global__ void __launch_bounds__(kWarp) assign(const __grid_constant__ LinearAssignmentParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x;
  const int64_t problem = blockIdx.x;
  int64_t* const out = p.out + problem * p.columns;
  for (int64_t i = lane; i < p.columns; i += kWarp) out[i] = -1;
  const int64_t used = p.used_columns[problem % p.period];
  AssignmentFault fault = used < 0 || used > p.columns ? AssignmentFault::kColumns : AssignmentFault::kNone;
  const AssignmentSides sides = assignment_sides(p, fault == AssignmentFault::kNone ? used : 0);
  const int starts = static_cast<int>(sides.starts), ends = static_cast<int>(sides.ends);
  const T* const cost = static_cast<const T*>(p.cost) + problem * p.problem_stride;

  // The numbers of the starts are in shared memory, or with those of the ends in the scratch memory.
  const int64_t most_ends = p.rows > p.columns ? p.rows : p.columns;
  const int64_t most_starts = p.rows > p.columns ? p.columns : p.rows;
  const int64_t lane_ends = ceil_div(most_ends, kWarp);
  unsigned char* room =
      kEnds ? shared : static_cast<unsigned char*>(p.scratch) + problem * assignment_scratch(p.rows, p.columns);
  double* const start_price = reinterpret_cast<double*>(room);
  room += ceil_div(most_starts, kWarp) * kWarp * sizeof(double);
  PerEnd<double, kEnds> end_price(room, lane_ends), distance(room, lane_ends);
  PerEnd<int, kEnds> start_of(room, lane_ends), came_from(room, lane_ends), place(room, lane_ends);
  int* const end_of = reinterpret_cast<int*>(room);  // PerEnd has advanced it if the ends are in memory
  const int count = kEnds ? kEnds : static_cast<int>(lane_ends);

#pragma unroll
  for (int k = 0; k < count; ++k) {
    end_price[k] = 0;
    start_of[k] = -1;
    came_from[k] = -1;
  }
  for (int i = lane; i < starts; i += kWarp) {
    start_price[i] = 0;
    end_of[i] = -1;
  }
  __syncwarp();
  for (int start = 0; start < starts && fault == AssignmentFault::kNone; ++start) {
    // `place` is an end's position in the list of remaining ends, kReached after its removal, kNone if there is no end.
    constexpr int kReached = -1, kNone = -2;
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const int end = k * kWarp + lane;
      place[k] = end < ends ? ends - 1 - end : kNone;
      distance[k] = INFINITY;
    }
    int left = ends, at = start, found = -1;
    double reached = 0;
    while (found < 0) {
      const double price = start_price[at];
      const T* const row = cost + at * sides.start_stride;
      unsigned long long key = ~0ull;
      unsigned tie = ~0u;  // lower means earlier in the list
      int mine = 0;
      bool valid = true;
      T costs[kEnds ? kEnds : 1] = {};  // load all before using the first
      if constexpr (kEnds > 0) {
#pragma unroll
        for (int k = 0; k < kEnds; ++k) {
          if (place[k] >= 0) costs[k] = row[(k * kWarp + lane) * sides.end_stride];
        }
      }
#pragma unroll
      for (int k = 0; k < count; ++k) {
        if (place[k] < 0) continue;
        const T c = kEnds ? costs[kEnds ? k : 0] : row[(k * kWarp + lane) * sides.end_stride];
        valid = valid && c > -T(INFINITY);
        const double length = sub_rn(sub_rn(add_rn(reached, static_cast<double>(c)), price), end_price[k]);
        if (length < distance[k]) {
          distance[k] = length;
          came_from[k] = at;
        }
        const unsigned long long ordered = in_order(distance[k]);
        const unsigned rank = start_of[k] < 0 ? ends - 1 - place[k] : ends + place[k];
        if (ordered < key || (ordered == key && rank < tie)) {
          key = ordered;
          tie = rank;
          mine = k;
        }
      }
      // The search of each start first examines all of its costs.
      if (at == start && !__all_sync(kFullWarp, valid)) {
        fault = AssignmentFault::kCost;
        break;
      }
      const unsigned high = warp_min(static_cast<unsigned>(key >> 32));
      const unsigned low = warp_min(static_cast<unsigned>(key >> 32) == high ? static_cast<unsigned>(key) : ~0u);
      const bool least = static_cast<unsigned>(key >> 32) == high && static_cast<unsigned>(key) == low;
      const unsigned first = warp_min(least ? tie : ~0u);
      const int winner = __ffs(static_cast<int>(__ballot_sync(kFullWarp, least && tie == first))) - 1;
      reached = from_order(static_cast<unsigned long long>(high) << 32 | low);
      if (reached == INFINITY) {
        fault = AssignmentFault::kInfinite;
        break;
      }
      const int best = __shfl_sync(kFullWarp, mine, winner);
      int owner = -1, freed = 0;
      if (kEnds) {
#pragma unroll
        for (int k = 0; k < count; ++k) {
          if (k != best) continue;
          owner = start_of[k];
          freed = place[k];
        }
      } else {
        owner = start_of[best];
        freed = place[best];
      }
      owner = __shfl_sync(kFullWarp, owner, winner);
      freed = __shfl_sync(kFullWarp, freed, winner);
      --left;  // the list's last end takes the position of the one that is reached
#pragma unroll
      for (int k = 0; k < count; ++k) {
        if (k == best && lane == winner) {
          place[k] = kReached;
        } else if (place[k] == left) {
          place[k] = freed;
        }
      }
      if (owner < 0) {
        found = best * kWarp + winner;
      } else {
        at = owner;
      }
    }
    if (fault != AssignmentFault::kNone) break;
    __syncwarp();
    if (lane == 0) start_price[start] = add_rn(start_price[start], reached);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      if (place[k] != kReached) continue;
      const double more = sub_rn(reached, distance[k]);
      if (start_of[k] >= 0) start_price[start_of[k]] = add_rn(start_price[start_of[k]], more);
      end_price[k] = sub_rn(end_price[k], more);
    }
    for (int end = found, from = -1; from != start;) {
      const int k = end / kWarp, source = end % kWarp;
      if (kEnds) {
#pragma unroll
        for (int z = 0; z < count; ++z) from = z == k ? came_from[z] : from;
      } else {
        from = came_from[k];
      }
      from = __shfl_sync(kFullWarp, from, source);
#pragma unroll
      for (int z = kEnds ? 0 : k; z < (kEnds ? count : k + 1); ++z) {
        if (z == k && lane == source) start_of[z] = from;
      }
      const int next = end_of[from];
      __syncwarp();
      if (lane == 0) end_of[from] = end;
      __syncwarp();
      end = next;
    }
  }
  if (fault == AssignmentFault::kInfinite) {  // later starts may have worse costs
    bool valid = true;
    for (int i = 0; i < starts; ++i) {
      for (int j = lane; j < ends; j += kWarp) {
        valid = valid && cost[i * sides.start_stride + j * sides.end_stride] > -T(INFINITY);
      }
    }
    if (!__all_sync(kFullWarp, valid)) fault = AssignmentFault::kCost;
  }
  __syncwarp();
  if (fault == AssignmentFault::kNone) {
    for (int i = lane; i < starts; i += kWarp) out[sides.from_rows ? end_of[i] : i] = sides.from_rows ? i : end_of[i];
  } else if (lane == 0 && p.status) {
    auto* const status = reinterpret_cast<unsigned long long*>(p.status);
    atomicAdd(status, 1ull);
    atomicMax(status + 1, static_cast<unsigned long long>(assignment_fault_code(problem, fault)));
  }
}

template <typename T, int kEnds>
cudaError_t launch(const LinearAssignmentParams& p, cudaStream_t stream) {
  const int64_t starts = p.rows > p.columns ? p.columns : p.rows;
  const int bytes = kEnds ? static_cast<int>(ceil_div(starts, kWarp)) * kWarp * kStartBytes : 0;
  assign<T, kEnds><<<static_cast<unsigned>(p.problems), kWarp, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch(const LinearAssignmentParams& p, cudaStream_t stream) {
  const int64_t ends = p.rows > p.columns ? p.rows : p.columns;
  if (ends <= kFewEnds * kWarp) return launch<T, kFewEnds>(p, stream);
  if (ends <= kManyEnds * kWarp) return launch<T, kManyEnds>(p, stream);
  return launch<T, 0>(p, stream);
}

}  // namespace

cudaError_t launch_linear_assignment(const LinearAssignmentParams& p, cudaStream_t stream) {
  if (p.status) {
    const cudaError_t error = cudaMemsetAsync(p.status, 0, kAssignmentStatusSize * sizeof(int64_t), stream);
    if (error != cudaSuccess) return error;
  }
  if (p.problems == 0 || p.columns == 0) return cudaSuccess;
  return p.dtype == DType::kFloat64 ? launch<double>(p, stream) : launch<float>(p, stream);
}

}  // namespace torch_fastdet::core
