// Run bbox_iou and iou_loss on the CPU. Pairs are gathered into blocks of coordinate arrays, for which the loops around
// box_math.h vectorise. parallel_for(begin, end, grain, f) distributes chunks of a fixed size.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/boxes/bbox_iou.h"
#include "core/common/cpu_types.h"
#include "core/common/instruction_set.h"

namespace torch_fastdet::core::boxes_loops {
namespace {  // local to each including file, so that functions called once are inlined

constexpr int kBlock = 128;
constexpr int64_t kChunk = 2048;
constexpr int64_t kGrainChunks = 4;  // about 50 microseconds of work per thread

template <typename T>
struct alignas(64) Block {
  T v[4][kBlock];
};

template <typename T>
using Values = T[kBlock];

// Process only whole blocks, so that a pair's result does not depend on its position. A block is padded with zeros.
template <IouKind kKind, typename T>
void value_loop(const Block<T>& a, const Block<T>& b, const IouConfig& config, Values<T>& out) {
  const T eps = static_cast<T>(config.eps);
  const auto loop = [&](auto is_xywh) {
    for (int i = 0; i < kBlock; ++i) {
      const T box1[4] = {a.v[0][i], a.v[1][i], a.v[2][i], a.v[3][i]};
      const T box2[4] = {b.v[0][i], b.v[1][i], b.v[2][i], b.v[3][i]};
      out[i] = box_iou<kKind>(make_box(box1, is_xywh, eps), make_box(box2, is_xywh, eps), eps);
    }
  };
  config.xywh ? loop(std::true_type{}) : loop(std::false_type{});
}

template <IouKind kKind, typename T>
void grad_loop(const Block<T>& a, const Block<T>& b, const IouConfig& config, const Values<T>& grad,
               Block<T>& __restrict grad1, Block<T>& __restrict grad2) {
  const T eps = static_cast<T>(config.eps);
  const auto loop = [&](auto is_xywh) {
    for (int i = 0; i < kBlock; ++i) {
      const T box1[4] = {a.v[0][i], a.v[1][i], a.v[2][i], a.v[3][i]};
      const T box2[4] = {b.v[0][i], b.v[1][i], b.v[2][i], b.v[3][i]};
      Box<T> grad_a;
      Box<T> grad_b;
      box_iou_grad<kKind>(make_box(box1, is_xywh, eps), make_box(box2, is_xywh, eps), eps, grad[i], grad_a, grad_b);
      T out1[4];
      T out2[4];
      fold_box_grad(grad_a, is_xywh, out1);
      fold_box_grad(grad_b, is_xywh, out2);
      for (int c = 0; c < 4; ++c) {
        grad1.v[c][i] = out1[c];
        grad2.v[c][i] = out2[c];
      }
    }
  };
  config.xywh ? loop(std::true_type{}) : loop(std::false_type{});
}

// Compute the offsets of `count` pairs, beginning with `first`, for each operand.
template <int kOperands>
void block_offsets(const BroadcastPlan<kOperands>& plan, int64_t first, int count,
                   int64_t (&offsets)[kOperands][kBlock]) {
  int64_t offset[kOperands];
  if (plan.dims <= 1) {
    broadcast_offsets(plan, first, offset);
    for (int k = 0; k < kOperands; ++k) {
      for (int i = 0; i < count; ++i) offsets[k][i] = offset[k] + i * plan.stride[k][0];
    }
    return;
  }
  for (int i = 0; i < count; ++i) {
    broadcast_offsets(plan, first + i, offset);
    for (int k = 0; k < kOperands; ++k) offsets[k][i] = offset[k];
  }
}

template <class Halves, typename T>
void load_block(const BoxesIn& boxes, const int64_t (&offsets)[kBlock], int count, Block<T>& block) {
  with_dtype<Halves>(boxes.dtype, [&](auto zero) {
    using Stored = decltype(zero);
    const auto* data = static_cast<const Stored*>(boxes.data);
    const int64_t step = boxes.coord_stride;
    for (int i = 0; i < count; ++i) {
      const Stored* row = data + offsets[i];
      for (int c = 0; c < 4; ++c) block.v[c][i] = static_cast<T>(row[c * step]);
    }
  });
  for (int c = 0; c < 4; ++c) std::fill(block.v[c] + count, block.v[c] + kBlock, T(0));
}

template <class Halves, typename T>
void store_values(void* data, DType dtype, int64_t first, int count, const Values<T>& values) {
  with_dtype<Halves>(dtype, [&](auto zero) {
    using Stored = decltype(zero);
    auto* out = static_cast<Stored*>(data) + first;
    for (int i = 0; i < count; ++i) out[i] = static_cast<Stored>(values[i]);
  });
}

// Store row i of the block in row `first + i` of a contiguous gradient.
template <class Halves, typename T>
void store_rows(void* data, DType dtype, int64_t first, int count, const Block<T>& block) {
  with_dtype<Halves>(dtype, [&](auto zero) {
    using Stored = decltype(zero);
    auto* out = static_cast<Stored*>(data) + 4 * first;
    for (int i = 0; i < count; ++i) {
      for (int c = 0; c < 4; ++c) out[4 * i + c] = static_cast<Stored>(block.v[c][i]);
    }
  });
}

template <class Halves, IouKind kKind, typename T>
void values_from(const BoxesIn& box1, const BoxesIn& box2, const BroadcastPlan<2>& plan, const IouConfig& config,
                 int64_t first, int count, Values<T>& out) {
  int64_t offsets[2][kBlock];
  Block<T> a;
  Block<T> b;
  block_offsets(plan, first, count, offsets);
  load_block<Halves>(box1, offsets[0], count, a);
  load_block<Halves>(box2, offsets[1], count, b);
  vectorised([&] { value_loop<kKind>(a, b, config, out); });
}

template <class Halves, IouKind kKind, typename T>
void grads_from(const IouBackwardParams& p, const BroadcastPlan<3>& plan, int64_t first, int count, Block<T>& grad1,
                Block<T>& grad2) {
  int64_t offsets[3][kBlock];
  Block<T> a;
  Block<T> b;
  alignas(64) Values<T> grad = {};
  block_offsets(plan, first, count, offsets);
  load_block<Halves>(p.box1, offsets[0], count, a);
  load_block<Halves>(p.box2, offsets[1], count, b);
  const T scale = static_cast<T>(p.grad_scale);
  with_dtype<Halves>(p.grad_dtype, [&](auto zero) {
    const auto* data = static_cast<const decltype(zero)*>(p.grad);
    for (int i = 0; i < count; ++i) grad[i] = static_cast<T>(data[offsets[2][i]]) * scale;
  });
  vectorised([&] { grad_loop<kKind>(a, b, p.config, grad, grad1, grad2); });
}

// Call f(first, count) for the blocks of pairs [begin, end).
template <typename F>
void for_blocks(int64_t begin, int64_t end, F&& f) {
  for (int64_t first = begin; first < end; first += kBlock) {
    f(first, static_cast<int>(std::min<int64_t>(kBlock, end - first)));
  }
}

// Call f(chunk, begin, end) for chunks of `size` items out of `total`, in parallel.
template <typename ParallelFor, typename F>
void for_chunks(int64_t total, int64_t size, const ParallelFor& parallel_for, F&& f) {
  const int64_t chunks = ceil_div(total, size);
  parallel_for(0, chunks, kGrainChunks, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) f(chunk, chunk * size, std::min(total, (chunk + 1) * size));
  });
}

// Compute the gradient of a broadcast tensor: each row sums `reduce` pairs, chunk by chunk in a fixed order.
template <class Halves, IouKind kKind, typename T, typename ParallelFor>
void reduced_pass(const IouBackwardParams& p, const IouGradPass& pass, const ParallelFor& parallel_for) {
  const bool first_box = pass.grad1 != nullptr;
  void* out = first_box ? pass.grad1 : pass.grad2;
  const DType dtype = first_box ? p.box1.dtype : p.box2.dtype;
  const int64_t pieces = std::max<int64_t>(1, ceil_div(pass.reduce, kChunk));  // pieces per row
  const int64_t rows_at_once = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, pass.reduce));
  std::vector<T> sums(static_cast<size_t>(4 * pass.rows * pieces), T(0));
  for_chunks(pass.rows * pieces, rows_at_once, parallel_for, [&](int64_t, int64_t begin, int64_t end) {
    Block<T> grad1;
    Block<T> grad2;
    // A chunk is either several whole rows (pieces = 1) or one piece of a row.
    const int64_t row = begin / pieces;
    const int64_t start = row * pass.reduce + (begin % pieces) * kChunk;
    const int64_t stop = pieces == 1 ? end * pass.reduce : std::min(start + kChunk, (row + 1) * pass.reduce);
    int64_t slot = begin;
    int64_t left = pass.reduce;  // pairs before the next row
    for_blocks(start, stop, [&](int64_t first, int count) {
      grads_from<Halves, kKind>(p, pass.pairs, first, count, grad1, grad2);
      const Block<T>& grads = first_box ? grad1 : grad2;
      for (int i = 0; i < count; ++i) {
        for (int c = 0; c < 4; ++c) sums[4 * slot + c] += grads.v[c][i];
        if (pieces == 1 && --left == 0) {
          ++slot;
          left = pass.reduce;
        }
      }
    });
  });
  with_dtype<Halves>(dtype, [&](auto zero) {
    using Stored = decltype(zero);
    for (int64_t row = 0; row < pass.rows; ++row) {
      for (int c = 0; c < 4; ++c) {
        double sum = 0;
        for (int64_t piece = 0; piece < pieces; ++piece) sum += sums[4 * (row * pieces + piece) + c];
        static_cast<Stored*>(out)[4 * row + c] = static_cast<Stored>(static_cast<T>(sum));
      }
    }
  });
}

template <class Halves, IouKind kKind, typename T, typename ParallelFor>
void direct_pass(const IouBackwardParams& p, const IouGradPass& pass, const ParallelFor& parallel_for) {
  for_chunks(pass.rows, kChunk, parallel_for, [&](int64_t, int64_t begin, int64_t end) {
    Block<T> grad1;
    Block<T> grad2;
    for_blocks(begin, end, [&](int64_t first, int count) {
      grads_from<Halves, kKind>(p, pass.pairs, first, count, grad1, grad2);
      if (pass.grad1) store_rows<Halves>(pass.grad1, p.box1.dtype, first, count, grad1);
      if (pass.grad2) store_rows<Halves>(pass.grad2, p.box2.dtype, first, count, grad2);
    });
  });
}

template <class Halves, typename ParallelFor>
void bbox_iou(const BboxIouParams& p, const ParallelFor& parallel_for) {
  with_kind(p.config.kind, p.box1, p.box2, [&](auto kind, auto zero) {
    using T = decltype(zero);
    for_chunks(p.pairs.numel, kChunk, parallel_for, [&](int64_t, int64_t begin, int64_t end) {
      alignas(64) Values<T> values;
      for_blocks(begin, end, [&](int64_t first, int count) {
        values_from<Halves, decltype(kind)::value>(p.box1, p.box2, p.pairs, p.config, first, count, values);
        if (p.loss) {
          for (T& value : values) value = T(1) - value;
        }
        store_values<Halves>(p.out, p.out_dtype, first, count, values);
      });
    });
  });
}

template <class Halves, typename ParallelFor>
void iou_loss(const IouLossParams& p, const ParallelFor& parallel_for) {
  with_kind(p.config.kind, p.box1, p.box2, [&](auto kind, auto zero) {
    using T = decltype(zero);
    constexpr int kLanes = 16;
    const int64_t total = p.pairs.numel;
    std::vector<double> sums(static_cast<size_t>(ceil_div(total, kChunk)));
    for_chunks(total, kChunk, parallel_for, [&](int64_t chunk, int64_t begin, int64_t end) {
      alignas(64) Values<T> values;
      T lanes[kLanes] = {};
      for_blocks(begin, end, [&](int64_t first, int count) {
        values_from<Halves, decltype(kind)::value>(p.box1, p.box2, p.pairs, p.config, first, count, values);
        std::fill(values + count, values + kBlock, T(1));
        for (int i = 0; i < kBlock; i += kLanes) {
          for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += T(1) - values[i + lane];
        }
      });
      for (const T lane : lanes) sums[chunk] += lane;
    });
    double sum = 0;
    for (const double part : sums) sum += part;
    if (p.reduction == IouReduction::kMean) sum /= static_cast<double>(total);
    with_dtype<Halves>(p.out_dtype, [&](auto out_zero) {
      using Stored = decltype(out_zero);
      *static_cast<Stored*>(p.out) = static_cast<Stored>(static_cast<T>(sum));
    });
  });
}

template <class Halves, typename ParallelFor>
void iou_backward(const IouBackwardParams& p, const ParallelFor& parallel_for) {
  with_kind(p.config.kind, p.box1, p.box2, [&](auto kind, auto zero) {
    using T = decltype(zero);
    for (int i = 0; i < p.passes; ++i) {
      if (p.pass[i].reduce == 1) {
        direct_pass<Halves, decltype(kind)::value, T>(p, p.pass[i], parallel_for);
      } else {
        reduced_pass<Halves, decltype(kind)::value, T>(p, p.pass[i], parallel_for);
      }
    }
  });
}

}  // namespace
}  // namespace torch_fastdet::core::boxes_loops
