// Compare the CPU loops of max_pools_cat with kernels/pool_problem.h.
#include <gtest/gtest.h>

#include "core/pool/max_pool_loops.h"
#include "kernels/backwards.h"
#include "kernels/pool_problem.h"

namespace torch_fastdet::core {
namespace {

struct Loops {
  static void seed(uint64_t) {}
  static bool forward(const MaxPoolParams& params) {
    with_dtype<Halves>(params.dtype, [&](auto zero) { pool_loops::forward<decltype(zero)>(params, backwards); });
    return true;
  }
  static bool backward(const MaxPoolParams& params) {
    with_dtype<Halves>(params.dtype, [&](auto zero) { pool_loops::backward<decltype(zero)>(params, backwards); });
    return true;
  }
};

TEST(PoolLoops, RandomShapesAndLayouts) {
  for (uint64_t seed = 0; seed < rounds(120) && !HasFailure(); ++seed) pool_problem::check<Loops>(seed);
}

TEST(PoolLoops, OfNaNsTheLastCountsAndInfinitiesAreValues) {
  pool_problem::check_nan_and_infinity<Loops>();
}

}  // namespace
}  // namespace torch_fastdet::core
