// Compare the kernels of sum_slices, pad_and_sum and sum_rows with slices_problem.h.
#include <gtest/gtest.h>

#include "emulator.h"
#include "slices_problem.h"

namespace torch_fastdet::core {
namespace {

struct Kernels {
  static void seed(uint64_t seed) { emulator::seed(seed); }
  static bool sum(const SumSlicesParams& params) { return launch_sum_slices(params, nullptr) == cudaSuccess; }
  static bool pad(const PadAndSumParams& params) { return launch_pad_and_sum(params, nullptr) == cudaSuccess; }
  static bool rows(const SumRowsParams& params) { return launch_sum_rows(params, nullptr) == cudaSuccess; }
};

TEST(SumSlicesKernels, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(30) && !HasFailure(); ++seed) slices_problem::check<Kernels>(seed);
}

TEST(PadAndSumKernels, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(30) && !HasFailure(); ++seed) slices_problem::check_pad<Kernels>(seed);
}

TEST(SumRowsKernels, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(30) && !HasFailure(); ++seed) slices_problem::check_rows<Kernels>(seed);
}

}  // namespace
}  // namespace torch_fastdet::core
