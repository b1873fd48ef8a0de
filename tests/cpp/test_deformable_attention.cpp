// Compare the CPU loops of deformable attention with kernels/deformable_attention_problem.h.
#include "core/deformable_attention/deformable_attention_loops.h"
#include "kernels/backwards.h"
#include "kernels/deformable_attention_problem.h"

namespace torch_fastdet::core {
namespace {

struct Loops {
  static void seed(uint64_t) {}
  static bool run(const DeformableAttentionParams& params) {
    with_dtype<Halves>(params.dtype, [&](auto zero) { deformable_loops::forward<decltype(zero)>(params, backwards); });
    return true;
  }
  static bool run(const DeformableAttentionBackwardParams& params) {
    with_dtype<Halves>(params.forward.dtype,
                       [&](auto zero) { deformable_loops::backward<decltype(zero)>(params, backwards); });
    return true;
  }
};

TEST(DeformableAttentionLoops, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(100) && !HasFailure(); ++seed) deformable_problem::check<Loops>(seed);
}

}  // namespace
}  // namespace torch_fastdet::core
