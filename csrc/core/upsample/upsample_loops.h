// Walk an UpsamplePlan or a CopyPlan on the CPU. Each call handles lines [begin, end) of the plan, so that threads can
// share them: extent[0] * extent[1] * extent[2] rows of W for NCHW, extent[0] * extent[1] lines of W * C for
// channels_last. Values are moved as unsigned integers of their size.
#pragma once

#include <cstring>

#include "core/upsample/upsample_plan.h"

namespace torch_fastdet::core {

inline int64_t upsample_lines(const UpsamplePlan& plan) {
  return plan.inner == 0 ? 0 : plan.extent[0] * plan.extent[1] * (plan.channels_last ? 1 : plan.extent[2]);
}

inline int64_t copy_lines(const CopyPlan& plan) {
  return plan.extent[0] * plan.extent[1] * plan.extent[2];
}

// Call f(a_offset, b_offset) for every line in [begin, end) of extent[0] x extent[1] x extent[2] lines.
template <typename F>
void for_each_line(const int64_t extent[3], const int64_t a_stride[3], const int64_t b_stride[3], int64_t begin,
                   int64_t end, F&& f) {
  if (begin >= end) return;
  int64_t i2 = begin % extent[2];
  int64_t i1 = begin / extent[2] % extent[1];
  int64_t i0 = begin / extent[2] / extent[1];
  for (int64_t line = begin; line < end; ++line) {
    f(i0 * a_stride[0] + i1 * a_stride[1] + i2 * a_stride[2], i0 * b_stride[0] + i1 * b_stride[1] + i2 * b_stride[2]);
    if (++i2 == extent[2]) {
      i2 = 0;
      if (++i1 == extent[1]) {
        i1 = 0;
        ++i0;
      }
    }
  }
}

// For channels_last a line is a whole row of pixels, and the caller of f walks the third dimension.
template <typename F>
void for_each_upsample_line(const UpsamplePlan& plan, int64_t begin, int64_t end, F&& f) {
  const int64_t extent[3] = {plan.extent[0], plan.extent[1], plan.channels_last ? 1 : plan.extent[2]};
  for_each_line(extent, plan.small_stride, plan.large_stride, begin, end, f);
}

template <typename T>
void upsample_forward_lines(const UpsamplePlan& plan, const T* x, T* out, int64_t begin, int64_t end) {
  const int64_t inner = plan.inner;
  for_each_upsample_line(plan, begin, end, [&](int64_t from, int64_t to) {
    const T* source = x + from;
    T* target = out + to;
    if (!plan.channels_last) {
      for (int64_t w = 0; w < inner; ++w) {
        target[2 * w] = source[w];
        target[2 * w + 1] = source[w];
      }
      std::memcpy(target + plan.large_row, target, 2 * inner * sizeof(T));
      return;
    }
    // Write one large row after the other, because long runs suit memory best. If rows are dense, copy the second one.
    const bool dense = plan.large_col == inner && (plan.extent[2] == 1 || plan.large_stride[2] == 2 * inner);
    for (int64_t row = 0; row < (dense ? 1 : 2); ++row, target += plan.large_row) {
      for (int64_t w = 0; w < plan.extent[2]; ++w) {
        const T* pixel = source + w * plan.small_stride[2];
        T* pair = target + w * plan.large_stride[2];
        std::memcpy(pair, pixel, inner * sizeof(T));
        std::memcpy(pair + plan.large_col, pixel, inner * sizeof(T));
      }
    }
    if (dense) std::memcpy(target, target - plan.large_row, plan.extent[2] * 2 * inner * sizeof(T));
  });
}

// Sum like the CUDA kernels: left to right, top to bottom, in Accumulate.
template <typename T, typename Accumulate>
struct SumSquares {
  static T sum(T top_left, T top_right, T bottom_left, T bottom_right) {
    return static_cast<T>(static_cast<Accumulate>(top_left) + static_cast<Accumulate>(top_right) +
                          static_cast<Accumulate>(bottom_left) + static_cast<Accumulate>(bottom_right));
  }

  // Compute `count` neighbours of one row from two rows, for NCHW.
  static void rows(const T* top, const T* bottom, T* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = sum(top[2 * i], top[2 * i + 1], bottom[2 * i], bottom[2 * i + 1]);
  }

  // Compute `count` channels of one pixel from four pixels, for channels_last.
  static void pixels(const T* top_left, const T* top_right, const T* bottom_left, const T* bottom_right, T* out,
                     int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = sum(top_left[i], top_right[i], bottom_left[i], bottom_right[i]);
  }
};

template <typename Sums, typename T>
void upsample_backward_lines(const UpsamplePlan& plan, const T* grad_out, T* grad_x, int64_t begin, int64_t end) {
  const int64_t inner = plan.inner;
  for_each_upsample_line(plan, begin, end, [&](int64_t to, int64_t from) {
    if (!plan.channels_last) {
      const T* top = grad_out + from;
      Sums::rows(top, top + plan.large_row, grad_x + to, inner);
      return;
    }
    for (int64_t w = 0; w < plan.extent[2]; ++w) {
      const T* top = grad_out + from + w * plan.large_stride[2];
      const T* bottom = top + plan.large_row;
      Sums::pixels(top, top + plan.large_col, bottom, bottom + plan.large_col, grad_x + to + w * plan.small_stride[2],
                   inner);
    }
  });
}

template <typename T>
void copy_lines_of(const CopyPlan& plan, const T* src, T* dst, int64_t begin, int64_t end) {
  for_each_line(plan.extent, plan.src_stride, plan.dst_stride, begin, end,
                [&](int64_t from, int64_t to) { std::memcpy(dst + to, src + from, plan.inner * sizeof(T)); });
}

}  // namespace torch_fastdet::core
