// softmax_backward on the CPU: the core's loops on Torch's threads.
#include "core/softmax/softmax_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/softmax/run.h"

namespace torch_fastdet::softmax_cpu {
namespace {

struct Cpu : OnDevice {
  static void run(const core::SoftmaxBackwardParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::softmax_loops::softmax_backward<decltype(zero)>(p, parallel_for); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_softmax<Cpu>(m);
}

}  // namespace torch_fastdet::softmax_cpu
