// Compare the CPU loops of sum_slices, pad_and_sum and sum_rows with kernels/slices_problem.h.
#include "core/slices/slices_loops.h"
#include "kernels/backwards.h"
#include "kernels/slices_problem.h"

namespace torch_fastdet::core {
namespace {

struct Loops {
  static void seed(uint64_t) {}
  static bool sum(const SumSlicesParams& params) {
    with_dtype<Halves>(params.dtype, [&](auto zero) { slices_loops::sum_slices<decltype(zero)>(params, backwards); });
    return true;
  }
  static bool pad(const PadAndSumParams& params) {
    with_dtype<Halves>(params.dtype, [&](auto zero) { slices_loops::pad_and_sum<decltype(zero)>(params, backwards); });
    return true;
  }
  static bool rows(const SumRowsParams& params) {
    with_dtype<Halves>(params.dtype, [&](auto zero) { slices_loops::sum_rows<decltype(zero)>(params, backwards); });
    return true;
  }
};

TEST(SumSlicesLoops, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(40) && !HasFailure(); ++seed) slices_problem::check<Loops>(seed);
}

TEST(PadAndSumLoops, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(40) && !HasFailure(); ++seed) slices_problem::check_pad<Loops>(seed);
}

TEST(SumRowsLoops, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(40) && !HasFailure(); ++seed) slices_problem::check_rows<Loops>(seed);
}

}  // namespace
}  // namespace torch_fastdet::core
