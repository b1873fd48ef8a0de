// Run multi_tensor on the CPU: parallel_for(begin, end, grain, f) shares segments, and vectorized code takes L1 blocks.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/common/cpu_types.h"
#include "core/common/instruction_set.h"
#include "core/multi_tensor/multi_tensor_plan.h"
#include "core/multi_tensor/optimizer_math.h"

namespace torch_fastdet::core::multi_tensor_loops {
namespace {  // of each file that includes this, so that functions called once are inlined

constexpr int64_t kBlock = 512;
constexpr int kLanes = 16;

// Hold the rows, the layouts of those that have one, and plan_segments()'s segments.
struct Work {
  const std::vector<Row>& rows;
  const std::vector<Layout>& layouts;
  std::vector<Segment> segments;

  Work(const std::vector<Row>& rows, const std::vector<Layout>& layouts) : rows(rows), layouts(layouts) {
    std::vector<int64_t> numels;
    numels.reserve(rows.size());
    for (const Row& row : rows) numels.push_back(row.numel);
    segments = plan_segments(numels);
  }
};

template <class Halves>
double read(const Scalar& scalar) {
  if (!scalar.data) return scalar.value;
  return with_dtype<Halves>(
      scalar.dtype, [&](auto zero) { return static_cast<double>(*static_cast<const decltype(zero)*>(scalar.data)); });
}

template <typename A>
struct Step {
  Rule rule;
  SgdScalars<A> sgd;
  AdamScalars<A> adam;
  A along;  // how far SGD goes along kSecond first
  A inv_scale, clip, decay, one_minus_decay;
  bool scaled, clipped, update, momentum, second, unfilled, write_grad, average;
  DType grad_type, param_type;
  bool reads_grad() const { return update || write_grad; }
};

template <typename A>
struct Block {
  A slot[kSlots][kBlock];
};

template <typename T, typename A>
TORCH_FASTDET_HOST_DEVICE void store_and_load(A* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<A>(static_cast<T>(values[i]));
}

// Round to the type in which a tensor stores its values.
template <class Halves, typename A>
TORCH_FASTDET_HOST_DEVICE void as_stored(DType type, A* values, int64_t count) {
  if (type == DType::kFloat16) store_and_load<typename Halves::Float16>(values, count);
  if (type == DType::kBFloat16) store_and_load<typename Halves::BFloat16>(values, count);
  if (type == DType::kFloat32 && std::is_same_v<A, double>) store_and_load<float>(values, count);
}

template <typename A>
TORCH_FASTDET_HOST_DEVICE void move_values(A* __restrict__ param, A* __restrict__ grad, A* __restrict__ buffer,
                                           A* __restrict__ second, int64_t count, const Step<A>& s) {
  if (s.rule == Rule::kAdam) {
    for (int64_t i = 0; i < count; ++i) adam_element(param[i], grad[i], buffer[i], second[i], s.adam);
  } else if (s.rule == Rule::kMuon) {
    const A rest = s.along;
    for (int64_t i = 0; i < count; ++i) {
      second[i] = muon_element(grad[i], buffer[i], s.sgd.momentum, rest, s.sgd.nesterov);
    }
  } else {
    if (s.second) {
      for (int64_t i = 0; i < count; ++i) param[i] = fused_mul_add(s.along, second[i], param[i]);
    }
    for (int64_t i = 0; i < count; ++i) sgd_element(param[i], grad[i], buffer[i], s.sgd, s.momentum, s.unfilled);
  }
}

// Round values where separate calls would store and load them.
template <class Halves, typename A>
TORCH_FASTDET_HOST_DEVICE void step_values(A* __restrict__ param, A* __restrict__ grad, A* __restrict__ buffer,
                                           A* __restrict__ average, A* __restrict__ second, int64_t count,
                                           const Step<A>& step) {
  const Step<A> s = step;
  if (s.scaled) {
    for (int64_t i = 0; i < count; ++i) grad[i] = mul_rn(grad[i], s.inv_scale);
    as_stored<Halves>(s.grad_type, grad, count);
  }
  if (s.clipped) {
    for (int64_t i = 0; i < count; ++i) grad[i] = mul_rn(grad[i], s.clip);
    as_stored<Halves>(s.grad_type, grad, count);
  }
  if (s.update) {
    move_values(param, grad, buffer, second, count, s);
    if (s.average) as_stored<Halves>(s.param_type, param, count);
  }
  if (s.average) {
    for (int64_t i = 0; i < count; ++i) average[i] = ema_element(average[i], param[i], s.decay, s.one_minus_decay);
  }
}

// Unscale in the gradient's type and add squares, lane by lane in a fixed order. Return whether all values were finite.
template <class Halves, typename A>
TORCH_FASTDET_HOST_DEVICE bool reduce_values(A* __restrict__ grad, int64_t count, A inv_scale, bool scaled, DType type,
                                             A* __restrict__ sums) {
  A check = 0;  // stays 0 while all are finite: inf * 0 and nan * 0 are nan
  for (int64_t i = 0; i < count; ++i) check += grad[i] * A(0);
  if (scaled) {
    for (int64_t i = 0; i < count; ++i) grad[i] = mul_rn(grad[i], inv_scale);
    as_stored<Halves>(type, grad, count);
  }
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += grad[i + lane] * grad[i + lane];
  }
  for (; i < count; ++i) sums[i % kLanes] += grad[i] * grad[i];
  return check == A(0);
}

// `slots` points to the block's values, in the order of Slot.
template <class Halves, typename A>
void step_block(A* const* slots, int64_t count, const Step<A>& step) {
  vectorised([&] { step_values<Halves>(slots[0], slots[1], slots[2], slots[3], slots[4], count, step); });
}

template <class Halves, typename A>
bool reduce_block(A* grad, int64_t count, A inv_scale, bool scaled, DType type, A* sums) {
  return vectorised([&] { return reduce_values<Halves>(grad, count, inv_scale, scaled, type, sums); });
}

// `at` holds the offsets (in elements) of the block's elements, or is null if these are contiguous.
template <typename T, typename A>
void load_as(A* out, const void* data, int64_t start, int64_t count, const int64_t* at) {
  const T* in = static_cast<const T*>(data);
  if (at) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<A>(in[at[i]]);
  } else if constexpr (std::is_same_v<T, A>) {
    std::memcpy(out, in + start, count * sizeof(A));
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<A>(in[start + i]);
  }
}

template <typename T, typename A>
void store_as(const A* in, void* data, int64_t start, int64_t count, const int64_t* at) {
  T* out = static_cast<T*>(data);
  if (at) {
    for (int64_t i = 0; i < count; ++i) out[at[i]] = static_cast<T>(in[i]);
  } else if constexpr (std::is_same_v<T, A>) {
    std::memcpy(out + start, in, count * sizeof(A));
  } else {
    for (int64_t i = 0; i < count; ++i) out[start + i] = static_cast<T>(in[i]);
  }
}

template <class Halves>
struct Piece {
  const Row& row;
  int64_t start, count;
  int64_t offsets[kSlots][kBlock];
  bool strided;

  Piece(const Work& work, const Row& row) : row(row), strided(row.layout >= 0), work_(work) {}

  void move(int64_t new_start, int64_t new_count) {
    start = new_start;
    count = new_count;
    if (!strided) return;
    for (int64_t i = 0; i < count; ++i) {
      int64_t at[kSlots];
      layout_offsets(work_.layouts[row.layout], start + i, at);
      for (int slot = 0; slot < kSlots; ++slot) offsets[slot][i] = at[slot];
    }
  }
  const int64_t* at(int slot) const { return strided ? offsets[slot] : nullptr; }
  template <typename A>
  void load(int slot, A* out) const {
    with_dtype<Halves>(slot_type(row, slot),
                       [&](auto zero) { load_as<decltype(zero)>(out, row.data[slot], start, count, at(slot)); });
  }
  template <typename A>
  void store(int slot, const A* in) const {
    with_dtype<Halves>(slot_type(row, slot),
                       [&](auto zero) { store_as<decltype(zero)>(in, row.data[slot], start, count, at(slot)); });
  }

 private:
  const Work& work_;
};

template <typename ParallelFor, typename F>
void for_segments(const Work& work, const ParallelFor& parallel_for, const F& f) {
  parallel_for(0, static_cast<int64_t>(work.segments.size()), 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(work.segments[i], i);
  });
}

struct Partial {
  double sum = 0;
  bool finite = true;
};

template <class Halves, typename A>
Partial reduce_segment(const Work& work, const Row& row, const Segment& segment, float inv_scale, bool scaled,
                       bool write) {
  Partial partial;
  A sums[kLanes] = {};
  A grad[kBlock];
  const DType type = slot_type(row, kGrad);
  Piece<Halves> piece(work, row);
  for (int64_t done = 0; done < segment.count; done += kBlock) {
    piece.move(segment.start + done, std::min(kBlock, segment.count - done));
    piece.load(kGrad, grad);
    partial.finite &= reduce_block<Halves>(grad, piece.count, static_cast<A>(inv_scale), scaled, type, sums);
    if (write) piece.store(kGrad, grad);
  }
  A sum = 0;
  for (const A lane : sums) sum += lane;
  partial.sum = sum;
  return partial;
}

// Compute in `w` what update() reads.
template <class Halves, typename ParallelFor>
void reduce(const Work& work, const ReduceParams& p, Workspace& w, const ParallelFor& parallel_for) {
  const bool scaled = p.scale != nullptr;
  const float inv_scale = scaled ? inverse_scale(*p.scale) : 1.f;
  std::vector<Partial> partials(work.segments.size());
  for_segments(work, parallel_for, [&](const Segment& segment, int64_t index) {
    const Row& row = work.rows[segment.row];
    if (!row.data[kGrad]) return;
    partials[index] = slot_type(row, kGrad) == DType::kFloat64
                          ? reduce_segment<Halves, double>(work, row, segment, inv_scale, scaled, p.write_grads)
                          : reduce_segment<Halves, float>(work, row, segment, inv_scale, scaled, p.write_grads);
  });
  double sum = 0;
  bool overflow = false;
  for (const Partial& partial : partials) {
    sum += partial.sum;
    overflow = overflow || !partial.finite;
  }
  finish_reduction(p, w, overflow, sum);
}

template <class Halves, typename A>
Step<A> row_step(const UpdateParams& p, const StepScalars& s, const Group* groups, const Row& row, int32_t index) {
  Step<A> step{};
  const bool has_grad = row.data[kGrad] && !s.skip;
  const bool steps = p.rule != Rule::kNone;
  step.rule = p.rule;
  step.update = steps && has_grad && row.group >= 0;
  step.write_grad = p.write_grads && has_grad && (!steps || step.update);
  step.average = p.ema && row.data[kAverage];
  step.momentum = row.data[kMomentum] != nullptr;
  step.second = row.data[kSecond] && p.rule != Rule::kSgd;
  step.inv_scale = static_cast<A>(s.inv_scale);
  step.scaled = s.scaled && step.reads_grad();
  step.clip = static_cast<A>(s.clip);
  step.clipped = s.clipped && step.reads_grad();
  step.decay = static_cast<A>(s.decay);
  step.one_minus_decay = static_cast<A>(s.one_minus_decay);
  step.grad_type = slot_type(row, kGrad);
  step.param_type = slot_type(row, kParam);
  if (step.update) {
    const Group& group = groups[row.group];
    step.sgd = {static_cast<A>(read<Halves>(group.lr)),
                static_cast<A>(read<Halves>(group.momentum)),
                static_cast<A>(1.0 - read<Halves>(group.dampening)),
                static_cast<A>(read<Halves>(group.weight_decay)),
                group.nesterov != 0,
                group.maximize != 0};
    // Like torch.optim.SGD, neither read nor write the buffer if momentum is 0, and do not dampen. MuSGD does both.
    if (p.rule == Rule::kSgd) step.momentum = step.momentum && step.sgd.momentum != A(0);
    const double last = read<Halves>(group.last);
    step.along = static_cast<A>(p.rule == Rule::kMuon ? 1.0 - read<Halves>(group.momentum) : last);
    if (p.rule == Rule::kAdam) {
      step.adam = adam_scalars<A>(read<Halves>(group.lr), read<Halves>(group.momentum), read<Halves>(group.dampening),
                                  read<Halves>(group.weight_decay), last, group.decoupled != 0, group.maximize != 0,
                                  static_cast<double>(*row.step) + 1.0);
    }
    step.unfilled = p.first_step || (p.unfilled && p.unfilled[index]);
  }
  return step;
}

template <class Halves, typename A>
void update_segment(const Work& work, const Row& row, const Segment& segment, const Step<A>& step) {
  const bool momentum = step.update && step.momentum, second = step.update && step.second;
  if (!step.reads_grad() && !step.average) return;
  Block<A> block;
  A* slots[kSlots];
  bool in_place = row.layout < 0 && !step.scaled && !step.clipped;
  for (int slot = 0; slot < kSlots; ++slot) {
    slots[slot] = block.slot[slot];
    const DType own = std::is_same_v<A, double> ? DType::kFloat64 : DType::kFloat32;
    in_place = in_place && (!row.data[slot] || slot_type(row, slot) == own);
  }
  if (in_place) {
    for (int64_t done = 0; done < segment.count; done += kBlock) {
      for (int slot = 0; slot < kSlots; ++slot) {
        if (row.data[slot]) slots[slot] = static_cast<A*>(row.data[slot]) + segment.start + done;
      }
      step_block<Halves>(slots, std::min(kBlock, segment.count - done), step);
    }
    return;
  }
  Piece<Halves> piece(work, row);
  for (int64_t done = 0; done < segment.count; done += kBlock) {
    piece.move(segment.start + done, std::min(kBlock, segment.count - done));
    if (row.data[kParam]) piece.load(kParam, block.slot[kParam]);
    if (step.reads_grad()) piece.load(kGrad, block.slot[kGrad]);
    if (momentum) piece.load(kMomentum, block.slot[kMomentum]);
    if (second && step.rule != Rule::kMuon) piece.load(kSecond, block.slot[kSecond]);
    if (step.average) piece.load(kAverage, block.slot[kAverage]);
    step_block<Halves>(slots, piece.count, step);
    if (step.update && row.data[kParam]) piece.store(kParam, block.slot[kParam]);
    // sgd_element takes the gradient by value, so the block still holds the multiplied one.
    if (step.write_grad) piece.store(kGrad, block.slot[kGrad]);
    if (momentum) piece.store(kMomentum, block.slot[kMomentum]);
    if (second && step.rule != Rule::kMovedSgd) piece.store(kSecond, block.slot[kSecond]);
    if (step.average) piece.store(kAverage, block.slot[kAverage]);
  }
}

// `groups` are the rows' groups. Those in `p` may be fewer and are not read.
template <class Halves, typename ParallelFor>
void update(const Work& work, const UpdateParams& p, const Group* groups, const Workspace& w,
            const ParallelFor& parallel_for) {
  const int64_t updates = p.ema && p.updates < 0 && p.counter ? *p.counter + 1 : p.updates;
  const StepScalars s = step_scalars(p, w, p.ema ? read<Halves>(p.decay) : 0, updates);
  for_segments(work, parallel_for, [&](const Segment& segment, int64_t) {
    const Row& row = work.rows[segment.row];
    if (has_double(row)) {
      update_segment<Halves>(work, row, segment, row_step<Halves, double>(p, s, groups, row, segment.row));
    } else {
      update_segment<Halves>(work, row, segment, row_step<Halves, float>(p, s, groups, row, segment.row));
    }
  });
  for (size_t i = 0; i < work.rows.size() && p.rule != Rule::kNone && !s.skip; ++i) {
    if (work.rows[i].group >= 0) finish_row(p, work.rows[i], i);
  }
  if (p.write_counter) *p.counter = updates;
}

}  // namespace
}  // namespace torch_fastdet::core::multi_tensor_loops
