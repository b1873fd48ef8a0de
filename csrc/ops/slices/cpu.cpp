// sum_slices and pad_and_sum on the CPU: the core's loops on Torch's threads.
#include "core/slices/slices_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/slices/run.h"

namespace torch_fastdet::slices_cpu {
namespace {

struct Cpu : OnDevice {
  static void sum(const core::SumSlicesParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::slices_loops::sum_slices<decltype(zero)>(p, parallel_for); });
  }
  static void pad(const core::PadAndSumParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::slices_loops::pad_and_sum<decltype(zero)>(p, parallel_for); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_slices<Cpu>(m);
}

}  // namespace torch_fastdet::slices_cpu
