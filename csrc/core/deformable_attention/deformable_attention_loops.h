// Run deformable attention on the CPU. parallel_for(begin, end, grain, f) distributes images, queries and heads.
#pragma once

#include <algorithm>
#include <vector>

#include "core/common/storage.h"
#include "core/deformable_attention/deformable_attention.h"
#include "core/deformable_attention/deformable_attention_math.h"

namespace torch_fastdet::core::deformable_loops {

// Call f(tap, weight, level, index of the point) for each point of a query and head.
template <typename A, typename F>
void for_each_point(const DeformableAttentionParams& p, int64_t row, const F& f) {
  const int64_t first = row * p.level_count * p.points;
  const A* const locations = static_cast<const A*>(p.locations);
  const A* const weights = static_cast<const A*>(p.weights);
  for (int l = 0; l < p.level_count; ++l) {
    const DeformableLevel& level = p.levels[l];
    for (int64_t i = first + l * p.points; i < first + (l + 1) * p.points; ++i) {
      f(deformable_tap(locations[2 * i], locations[2 * i + 1], level.width, level.height), weights[i], level, i);
    }
  }
}

// Call f(corner, element of the value) for each of a point's four pixels that lies inside.
template <typename A, typename F>
void for_each_corner(const DeformableAttentionParams& p, const DeformableTap<A>& tap, const DeformableLevel& level,
                     const F& f) {
  for (int corner = 0; corner < 4; ++corner) {
    const int x = tap.corner_x(corner), y = tap.corner_y(corner);
    if (!deformable_inside(x, y, level.width, level.height)) continue;
    f(corner, (level.first + int64_t{y} * level.width + x) * p.heads * p.channels);
  }
}

template <typename T, typename ParallelFor>
void forward(const DeformableAttentionParams& p, const ParallelFor& parallel_for) {
  using A = arithmetic_t<T>;
  const int64_t work = int64_t{p.level_count} * p.points * p.channels * 4;
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, work));
  parallel_for(0, p.batch * p.queries * p.heads, grain, [&](int64_t begin, int64_t end) {
    std::vector<A> sums(p.channels);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head = row % p.heads, image = row / p.heads / p.queries;
      const T* const value = static_cast<const T*>(p.value) + (image * p.pixels * p.heads + head) * int64_t{p.channels};
      std::fill(sums.begin(), sums.end(), A(0));
      for_each_point<A>(p, row, [&](const DeformableTap<A>& tap, A weight, const DeformableLevel& level, int64_t) {
        for_each_corner(p, tap, level, [&](int corner, int64_t at) {
          const A factor = weight * tap.share(corner);
          for (int c = 0; c < p.channels; ++c) sums[c] += factor * to_arithmetic(value[at + c]);
        });
      });
      T* const out = static_cast<T*>(p.out) + row * p.channels;
      for (int c = 0; c < p.channels; ++c) out[c] = from_arithmetic<T>(sums[c]);
    }
  });
}

// Each thread takes a whole image and head, so that the sums of the value's gradient have a fixed order.
template <typename T, typename ParallelFor>
void backward(const DeformableAttentionBackwardParams& params, const ParallelFor& parallel_for) {
  using A = arithmetic_t<T>;
  const DeformableAttentionParams& p = params.forward;
  parallel_for(0, p.batch * p.heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<A> sums(int64_t{p.pixels} * p.channels);
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t image = pair / p.heads, head = pair % p.heads;
      const int64_t offset = (image * p.pixels * p.heads + head) * p.channels;
      const T* const value = static_cast<const T*>(p.value) + offset;
      std::fill(sums.begin(), sums.end(), A(0));
      for (int64_t query = 0; query < p.queries; ++query) {
        const int64_t row = (image * p.queries + query) * p.heads + head;
        const T* const grad = static_cast<const T*>(params.grad) + row * p.channels;
        for_each_point<A>(p, row, [&](const DeformableTap<A>& tap, A weight, const DeformableLevel& level, int64_t i) {
          A products[4] = {};
          for_each_corner(p, tap, level, [&](int corner, int64_t at) {
            const A factor = weight * tap.share(corner);
            A* const sum = sums.data() + at / p.heads;
            for (int c = 0; c < p.channels; ++c) {
              const A g = to_arithmetic(grad[c]);
              products[corner] += g * to_arithmetic(value[at + c]);
              sum[c] += factor * g;
            }
          });
          const auto gradients = deformable_gradients(tap, products, weight, level.width, level.height);
          static_cast<A*>(params.grad_weights)[i] = gradients.weight;
          static_cast<A*>(params.grad_locations)[2 * i] = gradients.x;
          static_cast<A*>(params.grad_locations)[2 * i + 1] = gradients.y;
        });
      }
      T* const out = static_cast<T*>(params.grad_value) + offset;
      for (int64_t pixel = 0; pixel < p.pixels; ++pixel) {
        for (int c = 0; c < p.channels; ++c) {
          out[pixel * p.heads * p.channels + c] = from_arithmetic<T>(sums[pixel * p.channels + c]);
        }
      }
    }
  });
}

}  // namespace torch_fastdet::core::deformable_loops
