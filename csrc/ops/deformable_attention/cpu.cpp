// Deformable attention on the CPU: the core's loops on Torch's threads.
#include "core/deformable_attention/deformable_attention_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/deformable_attention/run.h"

namespace torch_fastdet::deformable_attention_cpu {
namespace {

struct Cpu : OnDevice {
  static constexpr bool kBounds = false;

  static void run(const core::DeformableAttentionParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::deformable_loops::forward<decltype(zero)>(p, parallel_for); });
  }
  static void run(const core::DeformableAttentionBackwardParams& p, const char*) {
    with_dtype(p.forward.dtype, [&](auto zero) { core::deformable_loops::backward<decltype(zero)>(p, parallel_for); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_deformable_attention<Cpu>(m);
}

}  // namespace torch_fastdet::deformable_attention_cpu
