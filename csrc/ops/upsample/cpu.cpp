// Run the upsample operators on the CPU, sharing the lines of their plans among the threads.
#include <algorithm>

#include "core/common/storage.h"
#include "core/upsample/upsample_avx2.h"
#include "core/upsample/upsample_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/upsample/run.h"

namespace torch_fastdet::upsample_cpu {
namespace {

// Return the minimum number of lines for a thread, enough to move about 32 K elements.
int64_t grain(int64_t lines, int64_t elements) {
  return std::max<int64_t>(1, lines * 32768 / std::max<int64_t>(1, elements));
}

template <typename T>
void forward(const core::UpsampleForwardParams& p) {
  const int64_t lines = core::upsample_lines(p.plan);
  parallel_for(0, lines, grain(lines, 4 * p.plan.small_numel()), [&](int64_t begin, int64_t end) {
    core::upsample_forward_lines(p.plan, static_cast<const T*>(p.x), static_cast<T*>(p.out), begin, end);
  });
  if (!p.skip) return;
  const int64_t copies = core::copy_lines(p.copy);
  parallel_for(0, copies, grain(copies, p.copy.numel()), [&](int64_t begin, int64_t end) {
    core::copy_lines_of(p.copy, static_cast<const T*>(p.skip), static_cast<T*>(p.skip_out), begin, end);
  });
}

template <typename Sums, typename T>
void backward(const core::UpsampleBackwardParams& p) {
  const int64_t lines = core::upsample_lines(p.plan);
  parallel_for(0, lines, grain(lines, 4 * p.plan.small_numel()), [&](int64_t begin, int64_t end) {
    core::upsample_backward_lines<Sums>(p.plan, static_cast<const T*>(p.grad_out), static_cast<T*>(p.grad_x), begin,
                                        end);
  });
}

// Call f with an unsigned integer of the element's size, as forward moves values and never computes with them.
template <typename F>
void dispatch_itemsize(int64_t itemsize, F&& f) {
  itemsize == 2 ? f(uint16_t{}) : itemsize == 4 ? f(uint32_t{}) : f(uint64_t{});
}

struct Cpu : OnDevice {
  static void run(const core::UpsampleForwardParams& p, const char*) {
    dispatch_itemsize(p.itemsize, [&](auto zero) { forward<decltype(zero)>(p); });
  }

  static void run(const core::UpsampleBackwardParams& p, const char*) {
#ifdef TORCH_FASTDET_AVX2
    if (has_avx2() && p.dtype == core::DType::kFloat16) {
      return backward<core::SumSquaresAvx2<c10::Half, core::Float16Lanes>, c10::Half>(p);
    }
    if (has_avx2() && p.dtype == core::DType::kBFloat16) {
      return backward<core::SumSquaresAvx2<c10::BFloat16, core::BFloat16Lanes>, c10::BFloat16>(p);
    }
#endif
    with_dtype(p.dtype, [&](auto zero) {
      using T = decltype(zero);
      backward<core::SumSquares<T, core::arithmetic_t<T>>, T>(p);
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_upsample<Cpu>(m);
}

}  // namespace torch_fastdet::upsample_cpu
