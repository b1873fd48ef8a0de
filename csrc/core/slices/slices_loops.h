// Run sum_slices, pad_and_sum and sum_rows on the CPU; parallel_for(begin, end, grain, f) shares rows and channels.
#pragma once

#include <algorithm>

#include "core/slices/slices.h"

namespace torch_fastdet::core::slices_loops {

template <typename T, typename ParallelFor>
void sum_slices(const SumSlicesParams& p, const ParallelFor& parallel_for) {
  parallel_for(0, p.rows, std::max<int64_t>(1, 32768 / p.width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* const out = static_cast<T*>(p.out) + row * p.out_pitch;
      for (int i = 0; i < p.count; ++i) {
        const T* const x = static_cast<const T*>(p.x[i]) + row * p.x_pitch[i];
        for (int64_t at = 0; at < p.width; ++at) out[at] = i == 0 ? x[at] : rounded_sum(out[at], x[at]);
      }
    }
  });
}

template <typename T, typename ParallelFor>
void pad_and_sum(const PadAndSumParams& p, const ParallelFor& parallel_for) {
  parallel_for(0, p.padded, std::max<int64_t>(1, 32768 / p.positions()), [&](int64_t begin, int64_t end) {
    for (int64_t channel = begin; channel < end; ++channel) {
      arithmetic_t<T> sum = 0;
      for (int64_t at = 0; at < p.positions(); ++at) {
        const int64_t image = at / p.pixels, pixel = at - image * p.pixels;
        const T* const x = static_cast<const T*>(p.x) + image * p.image_stride + pixel * p.pixel_stride;
        const T value = channel < p.channels ? x[channel * p.channel_stride] : from_arithmetic<T>(0);
        static_cast<T*>(p.out)[at * p.padded + channel] = value;
        sum += to_arithmetic(value);
      }
      static_cast<T*>(p.sums)[channel] = from_arithmetic<T>(sum);
    }
  });
}

template <typename T, typename ParallelFor>
void sum_rows(const SumRowsParams& p, const ParallelFor& parallel_for) {
  parallel_for(0, p.width, std::max<int64_t>(1, 32768 / p.rows), [&](int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; ++column) {
      arithmetic_t<T> sum = 0;
      for (int64_t row = 0; row < p.rows; ++row)
        sum += to_arithmetic(static_cast<const T*>(p.x)[row * p.width + column]);
      static_cast<T*>(p.sums)[column] = from_arithmetic<T>(sum);
    }
  });
}

}  // namespace torch_fastdet::core::slices_loops
