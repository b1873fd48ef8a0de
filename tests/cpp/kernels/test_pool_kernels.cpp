// Compare the kernels of max_pools_cat with pool_problem.h.
#include <gtest/gtest.h>

#include "emulator.h"
#include "pool_problem.h"

namespace torch_fastdet::core {
namespace {

struct Kernels {
  static void seed(uint64_t seed) { emulator::seed(seed); }
  static bool forward(const MaxPoolParams& params) { return launch_max_pool_forward(params, nullptr) == cudaSuccess; }
  static bool backward(const MaxPoolParams& params) { return launch_max_pool_backward(params, nullptr) == cudaSuccess; }
};

TEST(PoolKernels, RandomShapesAndLayouts) {
  for (uint64_t seed = 0; seed < rounds(120) && !HasFailure(); ++seed) pool_problem::check<Kernels>(seed);
}

TEST(PoolKernels, OfNaNsTheLastCountsAndInfinitiesAreValues) {
  pool_problem::check_nan_and_infinity<Kernels>();
}

}  // namespace
}  // namespace torch_fastdet::core
