// Forward, a warp takes a candidate, a thread cells, one block the sums. Backward, all cells come before matched ones.
#include <cstring>

#include "core/common/device.cuh"
#include "core/common/dtype.cuh"
#include "core/yolov5_loss/yolov5_loss.h"

namespace torch_fastdet::core {
namespace {

constexpr int kWarps = 8;  // warps of a block, in kernels where a warp has a candidate or a piece of a plane
constexpr int kObjectThreads = 256;
constexpr int kObjectCells = 2;  // loads of a thread that are in flight
// Blocks of a level are limited so that one block can add their results; each takes several pieces if there are more.
constexpr int kMostBlocks = 512;
constexpr int kMatchSums = 3;
constexpr int kSums = kMatchSums + 1;
constexpr int kRowCells = 128;  // cells of a block of the row gradient; also its threads
constexpr int kPlaneChunk = 2048;
constexpr int kClassesALane = 4;

template <typename Params>
__host__ __device__ int64_t slot_count(const Params& params) {
  return static_cast<int64_t>(kYolov5CellOffsets) * params.na * params.nt;
}

// Record a bad row, once for all its candidates. The atomics are on integers, so their order does not matter.
__device__ void note_fault(const Yolov5LossParams& params, int64_t target, int fault) {
  const auto first = static_cast<unsigned long long>(kYolov5FirstFault - (6 * target + fault - 1));
  atomicAdd(reinterpret_cast<unsigned long long*>(params.status), 1ULL);
  atomicMax(reinterpret_cast<unsigned long long*>(params.status) + 1, first);
}

// The greatest key stays, and whoever finds the cell taken marks it as shared. The first match of a cell does not know
// of the others, but the second one sees the first's key and stores the greater of both with the mark.
__device__ void claim_cell(uint64_t* owner, uint64_t key) {
  auto* cell = reinterpret_cast<unsigned long long*>(owner);
  const uint64_t held = atomicMax(cell, static_cast<unsigned long long>(key));
  if (held == 0) return;
  const uint64_t unmarked = held & ~kYolov5Shared;
  atomicMax(cell, static_cast<unsigned long long>((unmarked > key ? unmarked : key) | kYolov5Shared));
}

template <typename scalar_t>
__global__ void __launch_bounds__(kWarps* kWarp) match_kernel(const __grid_constant__ Yolov5LossParams params) {
  using T = arithmetic_t<scalar_t>;
  __shared__ T terms[kWarps][kMatchSums];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int level = blockIdx.y;
  const Yolov5Head& head = params.heads[level];
  const auto* logits = static_cast<const scalar_t*>(head.logits);
  const int64_t slots = slot_count(params);
  const int64_t used = params.num_targets ? *params.num_targets : params.nt;
  T box_sum = 0, class_sum = 0, matches = 0;

  for (int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + warp; slot < slots;
       slot += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t target = slot % params.nt;
    const auto a = static_cast<int>(slot / params.nt % params.na);
    const auto offset = static_cast<int>(slot / params.nt / params.na);
    const float* row = params.targets + 6 * target;
    const float* anchor = params.anchors + (level * params.na + a) * 2;
    Yolov5Match match{};
    if (target < used) {
      const int fault = yolov5_target_fault(row, params.bs, params.nc);
      if (fault == 0) match = yolov5_match(row + 2, anchor, head.nx, head.ny, params.anchor_t, offset);
      if (fault != 0 && level == 0 && offset == 0 && a == 0 && lane == 0) note_fault(params, target, fault);
    }
    int64_t cell = -1;
    Yolov5Box<T> box{};
    T wanted_objectness = 0;
    if (match.matched) {
      cell = yolov5_cell_number(head, params.na, {static_cast<int64_t>(row[0]), a, match.y, match.x});
      const scalar_t* at = logits + yolov5_logits_offset(head, params.na, params.no, cell);
      T box_logits[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) box_logits[i] = to_arithmetic(at[i * head.stride_o]);
      T class_term = 0;
      if (params.nc > 1) {
        const int wanted = static_cast<int>(row[1]);
        for (int c = lane; c < params.nc; c += kWarp) {
          class_term += binary_cross_entropy(to_arithmetic(at[(5 + c) * head.stride_o]),
                                             T(c == wanted ? params.positive : params.negative), T(params.cls_pw),
                                             T(params.fl_gamma))
                            .value;
        }
      }
      box = yolov5_box(box_logits, match, anchor);
      wanted_objectness = yolov5_objectness_target(box.ciou, T(params.gr));
      box_sum += T(1) - box.ciou;
      class_sum += warp_sum(class_term);
      matches += T(1);
    }
    const int64_t index = level * slots + slot;
    if (lane == 0) {
      params.state.match_cell[index] = cell;
      if (match.matched) {
        claim_cell(params.state.owner + head.first_cell + cell,
                   yolov5_key(params.sort_obj_iou, static_cast<float>(box.ciou), slot));
      }
    }
    if (lane < 5) {
      const T values[5] = {wanted_objectness, box.gradient[0], box.gradient[1], box.gradient[2], box.gradient[3]};
      T value = values[0];
#pragma unroll
      for (int i = 1; i < 5; ++i) value = lane == i ? values[i] : value;
      static_cast<T*>(params.state.match_values)[5 * index + lane] = value;
    }
  }
  if (lane == 0) {
    terms[warp][0] = box_sum;
    terms[warp][1] = class_sum;
    terms[warp][2] = matches;
  }
  __syncthreads();
  if (threadIdx.x < kMatchSums) {
    T sum = 0;
    for (int i = 0; i < kWarps; ++i) sum += terms[i][threadIdx.x];
    static_cast<T*>(
        params.match_partials)[(static_cast<int64_t>(level) * gridDim.x + blockIdx.x) * kMatchSums + threadIdx.x] = sum;
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(kObjectThreads) object_kernel(const __grid_constant__ Yolov5LossParams params) {
  using T = arithmetic_t<scalar_t>;
  const int level = blockIdx.y;
  const Yolov5Head& head = params.heads[level];
  const auto* logits = static_cast<const scalar_t*>(head.logits);
  const uint64_t* owner = params.state.owner + head.first_cell;
  const auto* targets = static_cast<const T*>(params.state.match_values) + 5 * level * slot_count(params);
  T* gradient = static_cast<T*>(params.state.object_gradient) + head.first_cell;
  const auto positive_weight = static_cast<T>(params.obj_pw), gamma = static_cast<T>(params.fl_gamma);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kObjectThreads;

  T sum = 0;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kObjectThreads + threadIdx.x; first < head.cells;
       first += kObjectCells * stride) {
    T values[kObjectCells];
    uint64_t keys[kObjectCells];
#pragma unroll
    for (int i = 0; i < kObjectCells; ++i) {
      const int64_t cell = first + i * stride;
      const bool inside = cell < head.cells;
      values[i] =
          inside ? to_arithmetic(logits[yolov5_logits_offset(head, params.na, params.no, cell) + 4 * head.stride_o])
                 : T(0);
      keys[i] = inside ? owner[cell] : 0;
    }
#pragma unroll
    for (int i = 0; i < kObjectCells; ++i) {
      const int64_t cell = first + i * stride;
      if (cell >= head.cells) break;
      const T target = keys[i] ? targets[5 * yolov5_key_slot(keys[i])] : T(0);
      const auto entropy = binary_cross_entropy(values[i], target, positive_weight, gamma);
      sum += entropy.value;
      gradient[cell] = entropy.gradient;
    }
  }
  sum = sum_of_warps<kObjectThreads / kWarp>(warp_sum(sum));
  if (threadIdx.x != 0) return;
  static_cast<T*>(params.object_partials)[static_cast<int64_t>(level) * gridDim.x + blockIdx.x] = sum;
}

// Run in a single block: a warp adds each sum of each level, then one thread computes the loss.
template <typename T>
__global__ void __launch_bounds__(kYolov5MaxLevels* kSums* kWarp)
    sum_kernel(const __grid_constant__ Yolov5LossParams params, int match_blocks, int object_blocks) {
  __shared__ double sums[kYolov5MaxLevels][kSums];
  {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int level = warp / kSums, which = warp % kSums;
    if (level < params.nl) {
      const bool is_match = which < kMatchSums;
      const int rows = is_match ? match_blocks : object_blocks;
      const int step = is_match ? kMatchSums : 1;
      const T* partials = is_match ? static_cast<const T*>(params.match_partials) + level * rows * kMatchSums + which
                                   : static_cast<const T*>(params.object_partials) + level * rows;
      double sum = 0;
#pragma unroll 8
      for (int i = lane; i < rows; i += kWarp) sum += static_cast<double>(partials[i * step]);
      sum = warp_sum(sum);
      if (lane == 0) sums[level][which] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  double box_loss = 0, object_loss = 0, class_loss = 0;
  const auto bs = static_cast<double>(params.bs);
  for (int level = 0; level < params.nl; ++level) {
    const auto cells = static_cast<double>(params.heads[level].cells);
    const double matches = sums[level][2], object_mean = sums[level][3] / cells;
    const double box_scale = matches > 0 ? params.box / matches : 0;
    const double class_scale = matches > 0 && params.nc > 1 ? params.cls / (matches * params.nc) : 0;
    const double object_scale = params.obj * params.balance[level];
    box_loss += box_scale * sums[level][0];
    class_loss += class_scale * sums[level][1];
    object_loss += object_scale * object_mean;
    T* values = static_cast<T*>(params.state.levels) + 4 * level;
    values[0] = static_cast<T>(object_mean);
    values[1] = static_cast<T>(bs * box_scale);
    values[2] = static_cast<T>(bs * object_scale / cells);
    values[3] = static_cast<T>(bs * class_scale);
  }
  T* items = static_cast<T*>(params.items);
  items[0] = static_cast<T>(box_loss);
  items[1] = static_cast<T>(object_loss);
  items[2] = static_cast<T>(class_loss);
  *static_cast<T*>(params.loss) = static_cast<T>((box_loss + object_loss + class_loss) * bs);
  if (params.num_targets && (*params.num_targets < 0 || *params.num_targets > params.nt)) {
    params.status[2] = *params.num_targets - params.nt;
  }
}

template <typename scalar_t>
struct ObjectGradient {
  using T = arithmetic_t<scalar_t>;
  const T* slopes;
  T factor;

  __device__ ObjectGradient(const Yolov5LossBackwardParams& params, int level)
      : slopes(static_cast<const T*>(params.state.object_gradient) + params.heads[level].first_cell),
        factor(*static_cast<const T*>(params.grad_loss) * static_cast<const T*>(params.state.levels)[4 * level + 2]) {}
  __device__ scalar_t operator()(int64_t cell) const { return from_arithmetic<scalar_t>(factor * slopes[cell]); }
};

// Hold sixteen bytes of elements, which are zero until set.
template <typename scalar_t>
struct alignas(16) Pack {
  static constexpr unsigned kSize = Vector<scalar_t>::kSize;
  uint32_t words[4] = {0, 0, 0, 0};

  // Do not take addresses, so that the words stay in registers.
  __device__ void set(unsigned position, scalar_t value) {
    if constexpr (sizeof(scalar_t) == 2) {
      uint16_t bits;
      memcpy(&bits, &value, sizeof bits);
      put(position / 2, static_cast<uint32_t>(bits) << (16 * (position % 2)));
    } else if constexpr (sizeof(scalar_t) == 4) {
      uint32_t bits;
      memcpy(&bits, &value, sizeof bits);
      put(position, bits);
    } else {
      uint32_t bits[2];
      memcpy(bits, &value, sizeof bits);
      put(2 * position, bits[0]);
      put(2 * position + 1, bits[1]);
    }
  }

 private:
  __device__ void put(unsigned word, uint32_t bits) {
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) words[i] |= word == i ? bits : 0;
  }
};

// Return the number of blocks of each dense kernel for a level, 0 if the level has the other layout.
__host__ __device__ int64_t row_blocks(const Yolov5Head& head) {
  return head.layout == Yolov5Layout::kPlanes ? 0 : ceil_div(head.cells, kRowCells);
}

__host__ __device__ int64_t plane_chunks(const Yolov5Head& head) {
  return ceil_div(head.ny * head.nx, kPlaneChunk);
}

template <typename Params>
__host__ __device__ int64_t plane_blocks(const Params& params, const Yolov5Head& head) {
  if (head.layout != Yolov5Layout::kPlanes) return 0;
  return ceil_div(params.bs * params.na * params.no * plane_chunks(head), kWarps);
}

// Write kRowCells cells, whose elements are contiguous: zeros except for element 4 of each cell.
template <typename scalar_t>
__device__ void write_rows(const Yolov5LossBackwardParams& params, int level, int64_t block) {
  __shared__ scalar_t objects[kRowCells];
  const Yolov5Head& head = params.heads[level];
  const int64_t first = block * kRowCells;
  const auto cells = static_cast<int>(head.cells - first < kRowCells ? head.cells - first : kRowCells);
  const scalar_t zero = from_arithmetic<scalar_t>(0);
  const ObjectGradient<scalar_t> object(params, level);
  for (int cell = threadIdx.x; cell < cells; cell += blockDim.x) objects[cell] = object(first + cell);
  __syncthreads();

  scalar_t* out = static_cast<scalar_t*>(head.gradient) + first * params.no;
  using Vector = Pack<scalar_t>;
  const auto no = static_cast<unsigned>(params.no);
  const unsigned elements = cells * no;
  // kRowCells elements of any type are a multiple of 16 bytes, so every block is as aligned as the first.
  const unsigned vectors = reinterpret_cast<uintptr_t>(head.gradient) % 16 == 0 ? elements / Vector::kSize : 0;
  // Track the row and column of the vector's first element without further divisions.
  const unsigned step = blockDim.x * Vector::kSize, step_rows = step / no, step_columns = step % no;
  unsigned row = threadIdx.x * Vector::kSize / no;
  unsigned column = threadIdx.x * Vector::kSize % no;
  for (unsigned v = threadIdx.x; v < vectors; v += blockDim.x) {
    Vector vector;
    unsigned object_row = column > 4 ? row + 1 : row;
    for (unsigned position = column > 4 ? no + 4 - column : 4 - column; position < Vector::kSize; position += no) {
      vector.set(position, objects[object_row++]);
    }
    reinterpret_cast<Vector*>(out)[v] = vector;
    row += step_rows;
    column += step_columns;
    if (column >= no) {
      column -= no;
      ++row;
    }
  }
  for (unsigned e = vectors * Vector::kSize + threadIdx.x; e < elements; e += blockDim.x) {
    out[e] = e % no == 4 ? objects[e / no] : zero;
  }
}

// Write a warp's part of one (ny, nx) plane: zeros, or the objectness.
template <typename scalar_t>
__device__ void write_planes(const Yolov5LossBackwardParams& params, int level, int64_t block) {
  const Yolov5Head& head = params.heads[level];
  const int lane = threadIdx.x % kWarp;
  const int64_t task = block * kWarps + threadIdx.x / kWarp;
  const int64_t chunks = plane_chunks(head), plane_size = head.ny * head.nx;
  const int64_t plane = task / chunks;
  if (plane >= params.bs * params.na * params.no) return;
  const int64_t begin = task % chunks * kPlaneChunk;
  const int64_t end = begin + kPlaneChunk < plane_size ? begin + kPlaneChunk : plane_size;
  scalar_t* out = static_cast<scalar_t*>(head.gradient) + plane * plane_size;
  const bool is_object = plane % params.no == 4;
  const int64_t first_cell = plane / params.no * plane_size;
  const scalar_t zero = from_arithmetic<scalar_t>(0);
  using Vector = Pack<scalar_t>;
  const ObjectGradient<scalar_t> object(params, level);
  if (is_object || plane_size % Vector::kSize != 0 || reinterpret_cast<uintptr_t>(head.gradient) % 16 != 0) {
    for (int64_t i = begin + lane; i < end; i += kWarp) out[i] = is_object ? object(first_cell + i) : zero;
    return;
  }
  for (int64_t i = begin + lane * Vector::kSize; i < end; i += kWarp * Vector::kSize) {
    *reinterpret_cast<Vector*>(out + i) = Vector();
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(kWarps* kWarp) dense_kernel(const __grid_constant__ Yolov5LossBackwardParams params) {
  int64_t block = blockIdx.x;
  for (int level = 0; level < params.nl; ++level) {
    const Yolov5Head& head = params.heads[level];
    const int64_t rows = row_blocks(head), planes = plane_blocks(params, head);
    if (block < rows) return write_rows<scalar_t>(params, level, block);
    if (block < planes) return write_planes<scalar_t>(params, level, block);
    block -= rows + planes;
  }
}

// Compute the gradients of matched cells. A cell's owner adds its matches (all in one anchor's slots) in a fixed order.
template <typename scalar_t>
__global__ void __launch_bounds__(kWarps* kWarp)
    matched_kernel(const __grid_constant__ Yolov5LossBackwardParams params) {
  using T = arithmetic_t<scalar_t>;
  const int lane = threadIdx.x % kWarp;
  const int level = blockIdx.y;
  const int64_t slots = slot_count(params);
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (slot >= slots) return;
  const Yolov5Head& head = params.heads[level];
  const int64_t* match_cell = params.state.match_cell + level * slots;
  const int64_t cell = match_cell[slot];
  if (cell < 0) return;
  const uint64_t key = params.state.owner[head.first_cell + cell];
  if (yolov5_key_slot(key) != slot) return;

  const auto* match_values = static_cast<const T*>(params.state.match_values) + 5 * level * slots;
  const auto* scale = static_cast<const T*>(params.state.levels) + 4 * level + 1;
  const T grad_loss = *static_cast<const T*>(params.grad_loss);
  const int64_t step = yolov5_gradient_step(head);
  const scalar_t* at =
      static_cast<const scalar_t*>(head.logits) + yolov5_logits_offset(head, params.na, params.no, cell);
  scalar_t* out = static_cast<scalar_t*>(head.gradient) + yolov5_gradient_offset(head, params.no, cell);

  for (int first_class = 0; first_class < params.nc; first_class += kWarp * kClassesALane) {
    T box = 0;  // lane i < 4 holds element i
    T matches = 0;
    T positives[kClassesALane] = {};
    const auto add = [&](int64_t other) {
      if (lane < 4) box += match_values[5 * other + 1 + lane];
      const int label = static_cast<int>(params.targets[6 * (other % params.nt) + 1]) - first_class - lane;
#pragma unroll
      for (int i = 0; i < kClassesALane; ++i) positives[i] += label == i * kWarp ? T(1) : T(0);
      matches += T(1);
    };
    if (key & kYolov5Shared) {
      const int64_t first = slot / params.nt % params.na * params.nt, step = params.na * params.nt;
      for (int64_t i = 0; i < params.nt; i += 2 * kWarp) {
        int64_t cells[2][kYolov5CellOffsets];  // load everything first: the latency of loads dominates this loop
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const int64_t target = i + part * kWarp + lane;
#pragma unroll
          for (int offset = 0; offset < kYolov5CellOffsets; ++offset) {
            cells[part][offset] = target < params.nt ? match_cell[offset * step + first + target] : -1;
          }
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
          for (int offset = 0; offset < kYolov5CellOffsets; ++offset) {
            unsigned same = __ballot_sync(kFullWarp, cells[part][offset] == cell);
            for (; same != 0; same &= same - 1) {
              add(offset * step + first + i + part * kWarp + __ffs(static_cast<int>(same)) - 1);
            }
          }
        }
      }
    } else {
      add(slot);
    }
    if (first_class == 0 && lane < 4) out[lane * step] = from_arithmetic<scalar_t>(grad_loss * scale[0] * box);
    if (params.nc == 1) return;
#pragma unroll
    for (int i = 0; i < kClassesALane; ++i) {
      const int c = first_class + i * kWarp + lane;
      if (c >= params.nc) continue;
      const T logit = to_arithmetic(at[(5 + c) * head.stride_o]);
      const auto slope = [&](double target) {
        return binary_cross_entropy(logit, T(target), T(params.cls_pw), T(params.fl_gamma)).gradient;
      };
      T sum = 0;
      if (positives[i] > 0) sum += positives[i] * slope(params.positive);
      if (positives[i] < matches) sum += (matches - positives[i]) * slope(params.negative);
      out[(5 + c) * step] = from_arithmetic<scalar_t>(grad_loss * scale[2] * sum);
    }
  }
}

}  // namespace

int64_t yolov5_match_blocks(const Yolov5LossParams& params) {
  const int64_t blocks = ceil_div(slot_count(params), kWarps);
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}

int64_t yolov5_object_blocks(const Yolov5LossParams& params) {
  int64_t cells = 0;
  for (int level = 0; level < params.nl; ++level) {
    if (params.heads[level].cells > cells) cells = params.heads[level].cells;
  }
  const int64_t blocks = ceil_div(cells, kObjectThreads);
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}

cudaError_t launch_yolov5_loss(const Yolov5LossParams& params, cudaStream_t stream) {
  int64_t cells = 0;
  for (int level = 0; level < params.nl; ++level) cells += params.heads[level].cells;
  cudaError_t error = cudaMemsetAsync(params.state.owner, 0, (cells + kYolov5StatusSize) * sizeof(uint64_t), stream);
  if (error != cudaSuccess) return error;
  return dispatch(params.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    const auto levels = static_cast<unsigned>(params.nl);
    const auto match_blocks = static_cast<unsigned>(yolov5_match_blocks(params));
    const auto object_blocks = static_cast<unsigned>(yolov5_object_blocks(params));
    if (match_blocks > 0) {
      match_kernel<scalar_t><<<dim3(match_blocks, levels), kWarps * kWarp, 0, stream>>>(params);
      if (const cudaError_t failed = cudaGetLastError(); failed != cudaSuccess) return failed;
    }
    object_kernel<scalar_t><<<dim3(object_blocks, levels), kObjectThreads, 0, stream>>>(params);
    if (const cudaError_t failed = cudaGetLastError(); failed != cudaSuccess) return failed;
    sum_kernel<arithmetic_t<scalar_t>><<<1, levels * kSums * kWarp, 0, stream>>>(params, static_cast<int>(match_blocks),
                                                                                 static_cast<int>(object_blocks));
    return cudaGetLastError();
  });
}

cudaError_t launch_yolov5_loss_backward(const Yolov5LossBackwardParams& params, cudaStream_t stream) {
  return dispatch(params.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    int64_t blocks = 0;
    for (int level = 0; level < params.nl; ++level) {
      blocks += row_blocks(params.heads[level]) + plane_blocks(params, params.heads[level]);
    }
    dense_kernel<scalar_t><<<static_cast<unsigned>(blocks), kWarps * kWarp, 0, stream>>>(params);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess || params.nt == 0) return error;
    const dim3 grid(static_cast<unsigned>(ceil_div(slot_count(params), kWarps)), static_cast<unsigned>(params.nl));
    matched_kernel<scalar_t><<<grid, kWarps * kWarp, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace torch_fastdet::core
