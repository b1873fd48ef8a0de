// max_pools_cat on the CPU: the core's loops on Torch's threads.
#include "core/pool/max_pool_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/pool/run.h"

namespace torch_fastdet::pool_cpu {
namespace {

struct Cpu : OnDevice {
  static void forward(const core::MaxPoolParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::pool_loops::forward<decltype(zero)>(p, parallel_for); });
  }
  static void backward(const core::MaxPoolParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::pool_loops::backward<decltype(zero)>(p, parallel_for); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_pool<Cpu>(m);
}

}  // namespace torch_fastdet::pool_cpu
