// Compare the kernels of space_to_depth with space_to_depth_problem.h.
#include <gtest/gtest.h>

#include "emulator.h"
#include "space_to_depth_problem.h"

namespace torch_fastdet::core {
namespace {

struct Kernels {
  static void seed(uint64_t seed) { emulator::seed(seed); }
  static bool forward(const SpaceToDepthParams& params) {
    return launch_space_to_depth(params, nullptr) == cudaSuccess;
  }
  static bool backward(const SpaceToDepthParams& params) {
    return launch_depth_to_space(params, nullptr) == cudaSuccess;
  }
};

TEST(SpaceToDepthKernels, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(100) && !HasFailure(); ++seed) space_to_depth_problem::check<Kernels>(seed);
}

}  // namespace
}  // namespace torch_fastdet::core
