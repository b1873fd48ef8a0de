// space_to_depth on the CPU: rows of the result are shared among the threads by parallel_for(begin, end, grain, f).
#pragma once

#include <algorithm>

#include "core/space_to_depth/space_to_depth.h"

namespace torch_fastdet::core::space_to_depth_loops {

// Call f(image, row) for each of `rows` rows of each image, of `elements` each.
template <typename ParallelFor, typename F>
void for_rows(const SpaceToDepthParams& p, int64_t rows, int64_t elements, const ParallelFor& parallel_for, F&& f) {
  parallel_for(0, p.batch * rows, std::max<int64_t>(1, 32768 / elements), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i / rows, i % rows);
  });
}

template <typename From, typename To, typename ParallelFor>
void forward(const SpaceToDepthParams& p, const ParallelFor& parallel_for) {
  const int64_t channels = p.deep_channels, width = p.deep_width();
  for_rows(p, p.deep_height(), width * channels, parallel_for, [&](int64_t n, int64_t h) {
    To* out = static_cast<To*>(p.target) + n * p.deep_stride[0] + h * p.deep_stride[2];
    for (int64_t w = 0; w < width; ++w) {
      for (int64_t e = 0; e < channels; ++e) *out++ = deep_element<From, To>(p, n, h, w, e);
    }
  });
}

template <typename From, typename To, typename ParallelFor>
void backward(const SpaceToDepthParams& p, const ParallelFor& parallel_for) {
  for_rows(p, p.height, p.width * p.channels, parallel_for, [&](int64_t n, int64_t y) {
    To* const row = static_cast<To*>(p.target) + n * p.image_stride[0] + y * p.image_stride[2];
    for (int64_t c = 0; c < p.channels; ++c) {
      for (int64_t x = 0; x < p.width; ++x) {
        row[c * p.image_stride[1] + x * p.image_stride[3]] = image_element<From, To>(p, n, y, x, c);
      }
    }
  });
}

}  // namespace torch_fastdet::core::space_to_depth_loops
