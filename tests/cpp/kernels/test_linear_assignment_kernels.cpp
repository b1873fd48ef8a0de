// Compare the kernel of linear_assignment with the CPU loops, index by index. tests/ops/test_linear_assignment.py
// compares the loops with SciPy.
#include <gtest/gtest.h>

#include "backwards.h"
#include "emulator.h"
#include "linear_assignment_problem.h"

namespace torch_fastdet::core {
namespace {

using assignment_problem::Problem;

void check(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  emulator::seed(seed);
  const bool large = random.chance(4);  // more ends than stay in registers
  const int64_t rows = random.below(large ? 1100 : random.chance(20) ? 340 : 40);
  Problem problem(random, 1 + random.below(5), rows, random.below(large ? 5 : 40), random.chance(20));
  std::vector<int64_t> found = problem.out(), wanted = problem.out(), status(kAssignmentStatusSize, 7);
  std::vector<unsigned char> scratch(problem.problems * assignment_scratch(problem.rows, problem.columns));
  std::vector<AssignmentFault> faults(problem.problems);
  LinearAssignmentParams p = problem.params(wanted);
  assignment_problem::run(p, faults.data(), backwards);
  p.out = found.data();
  p.scratch = scratch.data();
  p.status = status.data();
  ASSERT_EQ(launch_linear_assignment(p, nullptr), cudaSuccess);
  EXPECT_EQ(found, wanted);
  int64_t count = 0, code = 0;
  for (int64_t n = problem.problems; n-- > 0;) {
    if (faults[n] == AssignmentFault::kNone || problem.columns == 0) continue;
    ++count;
    code = assignment_fault_code(n, faults[n]);
  }
  EXPECT_EQ(status, (std::vector<int64_t>{count, code}));
}

TEST(LinearAssignmentKernels, RandomProblems) {
  for (uint64_t seed = 0; seed < rounds(60) && !HasFailure(); ++seed) check(seed);
}

}  // namespace
}  // namespace torch_fastdet::core
