// Compare the CPU loops of softmax_backward with kernels/softmax_problem.h.
#include "core/softmax/softmax_loops.h"
#include "kernels/backwards.h"
#include "kernels/softmax_problem.h"

namespace torch_fastdet::core {
namespace {

struct Loops {
  static void seed(uint64_t) {}
  static bool run(const SoftmaxBackwardParams& params) {
    with_dtype<Halves>(params.dtype,
                       [&](auto zero) { softmax_loops::softmax_backward<decltype(zero)>(params, backwards); });
    return true;
  }
};

TEST(SoftmaxLoops, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(40) && !HasFailure(); ++seed) softmax_problem::check<Loops>(seed);
}

}  // namespace
}  // namespace torch_fastdet::core
