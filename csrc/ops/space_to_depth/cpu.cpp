// space_to_depth on the CPU: threads share the rows of the result.
#include <ATen/Parallel.h>

#include <algorithm>

#include "ops/common/dispatch.h"
#include "ops/space_to_depth/run.h"

namespace torch_fastdet::space_to_depth_cpu {
namespace {

// Calls f(zero of the source's type, zero of the target's).
template <typename F>
void with_types(const core::SpaceToDepthParams& p, F&& f) {
  with_dtype(p.source_dtype, [&](auto from) { with_dtype(p.target_dtype, [&](auto to) { f(from, to); }); });
}

// Calls f(image, row) for each of `rows` rows of each image, on several threads.
template <typename F>
void for_rows(const core::SpaceToDepthParams& p, int64_t rows, int64_t elements, F&& f) {
  at::parallel_for(0, p.batch * rows, std::max<int64_t>(1, 32768 / elements), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i / rows, i % rows);
  });
}

struct Cpu : OnDevice {
  static void forward(const core::SpaceToDepthParams& p, const char*) {
    with_types(p, [&](auto from, auto to) {
      using From = decltype(from);
      using To = decltype(to);
      const int64_t channels = p.deep_channels, width = p.deep_width();
      for_rows(p, p.deep_height(), width * channels, [&](int64_t n, int64_t h) {
        To* out = static_cast<To*>(p.target) + n * p.deep_stride[0] + h * p.deep_stride[2];
        for (int64_t w = 0; w < width; ++w) {
          for (int64_t e = 0; e < channels; ++e) *out++ = core::deep_element<From, To>(p, n, h, w, e);
        }
      });
    });
  }

  static void backward(const core::SpaceToDepthParams& p, const char*) {
    with_types(p, [&](auto from, auto to) {
      using From = decltype(from);
      using To = decltype(to);
      for_rows(p, p.height, p.width * p.channels, [&](int64_t n, int64_t y) {
        To* const row = static_cast<To*>(p.target) + n * p.image_stride[0] + y * p.image_stride[2];
        for (int64_t c = 0; c < p.channels; ++c) {
          for (int64_t x = 0; x < p.width; ++x) {
            row[c * p.image_stride[1] + x * p.image_stride[3]] = core::image_element<From, To>(p, n, y, x, c);
          }
        }
      });
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_space_to_depth<Cpu>(m);
}

}  // namespace torch_fastdet::space_to_depth_cpu
