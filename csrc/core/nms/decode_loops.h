// Run the YOLOv5 decode on the CPU. parallel_for(begin, end, grain, f) distributes anchors over threads.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/common/exact_math_avx2.h"
#include "core/nms/candidates.h"
#include "core/nms/decode.h"

namespace torch_fastdet::core::nms_loops {
namespace {  // local to each including file, so that functions called once are inlined

constexpr int64_t kCells = 16;  // cells decoded together: whole vectors of any instruction set

template <typename A>
void sigmoids(const A* logits, A* shares) {
  for (int64_t i = 0; i < kCells; ++i) shares[i] = sigmoid(logits[i]);
}

#ifdef TORCH_FASTDET_AVX2
TORCH_FASTDET_AVX2 inline void sigmoids_avx2(const float* logits, float* shares) {
  const __m256 one = _mm256_set1_ps(1.f), sign = _mm256_set1_ps(-0.f);
  for (int64_t i = 0; i < kCells; i += 8) {
    const __m256 power = exp_rn_avx2(_mm256_xor_ps(_mm256_loadu_ps(logits + i), sign));
    _mm256_storeu_ps(shares + i, _mm256_div_ps(one, _mm256_add_ps(one, power)));
  }
}
#endif

template <typename A>
using Sigmoids = void (*)(const A* logits, A* shares);

template <typename A>
Sigmoids<A> sigmoid_kernel() {
#ifdef TORCH_FASTDET_AVX2
  if constexpr (std::is_same_v<A, float>) {
    if (has_avx2()) return sigmoids_avx2;
  }
#endif
  return sigmoids<A>;
}

// Return a channel of `count` neighbouring cells as contiguous values, copied to `room` unless they already are.
template <typename T>
const arithmetic_t<T>* side_by_side(const T* from, int64_t step, int64_t count, arithmetic_t<T>* room) {
  if constexpr (std::is_same_v<T, arithmetic_t<T>>) {
    if (step == 1 && count == kCells) return from;
  }
  for (int64_t i = 0; i < count; ++i) room[i] = Storage<T>::load(from[i * step]);
  return room;
}

// Decode the rows of `count` neighbouring cells, beginning with the anchor's.
template <typename T>
void decode_cells(const CandidateSource& source, const HeadAnchor<T>& anchor, int64_t count,
                  Sigmoids<arithmetic_t<T>> apply, T* rows) {
  using A = arithmetic_t<T>;
  const Cell& cell = anchor.cell;
  const HeadLevel& head = source.level[cell.level];
  const float* sides = source.anchor_sides + (cell.level * source.anchors_per_cell + cell.anchor) * 2;
  const int64_t logits = 5 + source.classes, width = logits + source.extra, step = head.boxes.column;
  const A stride = A(head.stride);
  A room[kCells] = {}, shares[kCells];
  for (int64_t c = 0; c < width; ++c) {
    const T* from = anchor.boxes + c * head.boxes.channel;
    __builtin_prefetch(from + kCells * step);  // the same channel of the next cells, pages away from the next channel
    const A* values = side_by_side(from, step, count, room);
    if (c < logits) {
      apply(values, shares);
      values = shares;
    }
    if (c < 2) {
      for (int64_t i = 0; i < count; ++i) shares[i] = center_of(shares[i], c == 0 ? cell.column + i : cell.row, stride);
    } else if (c < 4) {
      for (int64_t i = 0; i < count; ++i) shares[i] = side_of(shares[i], mul_rn(A(sides[c - 2]), stride));
    }
    for (int64_t i = 0; i < count; ++i) rows[i * width + c] = Storage<T>::store(values[i]);
  }
}

template <typename T, typename ParallelFor>
void decode(const DecodeParams& params, const ParallelFor& parallel_for) {
  const CandidateSource& source = params.source;
  const int64_t width = 5 + source.classes + source.extra;
  const auto apply = sigmoid_kernel<arithmetic_t<T>>();
  parallel_for(0, source.images * source.anchors, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin, count; i < end; i += count) {
      const auto anchor = AnchorHeadLayout<T>::anchor(source, i / source.anchors, i % source.anchors);
      count = std::min({kCells, end - i, source.level[anchor.cell.level].columns - anchor.cell.column});
      decode_cells<T>(source, anchor, count, apply, static_cast<T*>(params.output) + i * width);
    }
  });
}

}  // namespace
}  // namespace torch_fastdet::core::nms_loops
