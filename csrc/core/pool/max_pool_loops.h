// Run max poolings on the CPU; parallel_for(begin, end, grain, f) shares rows of pixels among the threads.
#pragma once

#include <algorithm>
#include <limits>

#include "core/common/storage.h"
#include "core/pool/max_pool.h"

namespace torch_fastdet::core::pool_loops {

// Call f(n, c, h, w) for each element, in memory order.
template <typename ParallelFor, typename F>
void for_elements(const MaxPoolParams& p, const ParallelFor& parallel_for, F&& f) {
  const int64_t grain = std::max<int64_t>(1, 4096 / (p.channels * p.width));
  parallel_for(0, p.batch * p.height, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t outer = p.channels_last ? p.width : p.channels, inner = p.channels_last ? p.channels : p.width;
      for (int64_t a = 0; a < outer; ++a) {
        for (int64_t b = 0; b < inner; ++b) {
          f(i / p.height, p.channels_last ? b : a, i % p.height, p.channels_last ? a : b);
        }
      }
    }
  });
}

template <typename T>
const T* source_of(const PoolTensor& tensor) {
  return static_cast<const T*>(tensor.data);
}

template <typename T>
T* target_of(const PoolTensor& tensor) {
  return static_cast<T*>(tensor.data);
}

template <typename T, typename ParallelFor>
void forward(const MaxPoolParams& p, const ParallelFor& parallel_for) {
  using A = arithmetic_t<T>;
  const int side = p.before + 1 + p.after;
  for_elements(p, parallel_for, [&](int64_t n, int64_t c, int64_t h, int64_t w) {
    const PoolSpan rows(h, p.source_height, p.before, p.after), columns(w, p.source_width, p.before, p.after);
    const T* const center = source_of<T>(p.source) + p.source.offset(n, c, h, w);
    Largest<A> best{-std::numeric_limits<A>::infinity(), (rows.first + p.before) * side + columns.first + p.before};
    for (int dy = rows.first; dy <= rows.last; ++dy) {
      for (int dx = columns.first; dx <= columns.last; ++dx) {
        best.consider(to_arithmetic(center[dy * p.source.stride[2] + dx * p.source.stride[3]]),
                      (dy + p.before) * side + dx + p.before);
      }
    }
    target_of<T>(p.target)[p.target.offset(n, c, h, w)] = from_arithmetic<T>(best.value);
    if (p.indices.data) target_of<uint8_t>(p.indices)[p.indices.offset(n, c, h, w)] = static_cast<uint8_t>(best.place);
    if (p.copy.data) target_of<T>(p.copy)[p.copy.offset(n, c, h, w)] = *center;
  });
}

template <typename T, typename ParallelFor>
void backward(const MaxPoolParams& p, const ParallelFor& parallel_for) {
  const int side = p.before + 1 + p.after;
  for_elements(p, parallel_for, [&](int64_t n, int64_t c, int64_t h, int64_t w) {
    const PoolSpan rows(h, p.source_height, p.before, p.after), columns(w, p.source_width, p.before, p.after);
    const T* const source = source_of<T>(p.source) + p.source.offset(n, c, h, w);
    const uint8_t* const indices = source_of<uint8_t>(p.indices) + p.indices.offset(n, c, h, w);
    arithmetic_t<T> sum = 0;
    if (p.copy.data) sum = to_arithmetic(source_of<T>(p.copy)[p.copy.offset(n, c, h, w)]);
    for (int dy = rows.first; dy <= rows.last; ++dy) {
      for (int dx = columns.first; dx <= columns.last; ++dx) {
        const int place = indices[dy * p.indices.stride[2] + dx * p.indices.stride[3]];
        if (place != (p.after - dy) * side + p.after - dx) continue;
        sum += to_arithmetic(source[dy * p.source.stride[2] + dx * p.source.stride[3]]);
      }
    }
    target_of<T>(p.target)[p.target.offset(n, c, h, w)] = from_arithmetic<T>(sum);
  });
}

}  // namespace torch_fastdet::core::pool_loops
