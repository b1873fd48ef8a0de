// Compare the kernel of softmax_backward with softmax_problem.h.
#include <gtest/gtest.h>

#include "emulator.h"
#include "softmax_problem.h"

namespace torch_fastdet::core {
namespace {

struct Kernels {
  static void seed(uint64_t seed) { emulator::seed(seed); }
  static bool run(const SoftmaxBackwardParams& params) {
    return launch_softmax_backward(params, nullptr) == cudaSuccess;
  }
};

TEST(SoftmaxKernels, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(30) && !HasFailure(); ++seed) softmax_problem::check<Kernels>(seed);
}

}  // namespace
}  // namespace torch_fastdet::core
