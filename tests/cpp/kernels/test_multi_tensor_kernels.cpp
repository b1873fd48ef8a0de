// Compare the kernels of multi_tensor with multi_tensor_problem.h.
#include <gtest/gtest.h>

#include "emulator.h"
#include "multi_tensor_problem.h"

namespace torch_fastdet::core {
namespace {

using multi_tensor_problem::TestList;

struct Kernels {
  static void seed(uint64_t seed) { emulator::seed(seed); }
  static bool reduce(TestList&, const ReduceParams& params) {
    return multi_tensor_reduce(params, nullptr) == cudaSuccess;
  }
  // Launch them as csrc/ops/multi_tensor/cuda.cpp does.
  static bool update(TestList&, UpdateParams params, const std::vector<Group>& groups) {
    const bool write_counter = params.write_counter;
    const auto count = static_cast<int64_t>(groups.size());
    int64_t first = 0;
    do {
      const int64_t now = std::min<int64_t>(count - first, kMaxGroups);
      params.first_group = static_cast<int32_t>(first);
      params.num_groups = static_cast<int32_t>(now);
      std::copy_n(groups.begin() + first, now, params.groups);
      first += now;
      params.write_counter = write_counter && first >= count;
      if (multi_tensor_update(params, nullptr) != cudaSuccess) return false;
    } while (first < count);
    return true;
  }
};

TEST(MultiTensorKernels, RandomListsAndSteps) {
  for (uint64_t seed = 0; seed < rounds(150) && !HasFailure(); ++seed) {
    multi_tensor_problem::reduce_and_update<Kernels>(seed);
  }
}

TEST(MultiTensorKernels, SumsInAFixedOrder) {
  multi_tensor_problem::check_order_of_sums<Kernels>();
}

}  // namespace
}  // namespace torch_fastdet::core
