// The CPU loops of linear_assignment: no assignment of a small problem costs less. That it is SciPy's among equal ones
// is tested in Python.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/backwards.h"
#include "kernels/linear_assignment_problem.h"

namespace torch_fastdet::core {
namespace {

using assignment_problem::Problem;

// The least cost of assigning columns from `column` on, `left` of which get no row.
double least(const Problem& problem, int64_t n, int64_t column, int64_t left, std::vector<bool>& taken) {
  if (column == problem.used[n]) return left ? INFINITY : 0;
  double best = left ? least(problem, n, column + 1, left - 1, taken) : INFINITY;
  for (int64_t row = 0; row < problem.rows; ++row) {
    if (taken[row]) continue;
    taken[row] = true;
    best = std::min(best, problem.cost(n, row, column) + least(problem, n, column + 1, left, taken));
    taken[row] = false;
  }
  return best;
}

TEST(LinearAssignmentLoops, NothingCostsLess) {
  for (uint64_t seed = 0; seed < rounds(300) && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    Problem problem(random, 1 + random.below(3), random.below(6), random.below(6), false);
    std::vector<int64_t> out = problem.out();
    std::vector<AssignmentFault> faults(problem.problems);
    assignment_problem::run(problem.params(out), faults.data(), backwards);
    for (int64_t n = 0; n < problem.problems; ++n) {
      ASSERT_EQ(faults[n], AssignmentFault::kNone);
      std::vector<bool> taken(problem.rows, false);
      double found = 0;
      int64_t left = 0;
      for (int64_t column = 0; column < problem.columns; ++column) {
        const int64_t row = out[n * problem.columns + column];
        if (row < 0) {
          left += column < problem.used[n];
          continue;
        }
        ASSERT_TRUE(column < problem.used[n] && row < problem.rows && !taken[row]);
        taken[row] = true;
        found += problem.cost(n, row, column);
      }
      ASSERT_EQ(left, std::max<int64_t>(problem.used[n] - problem.rows, 0));
      std::fill(taken.begin(), taken.end(), false);
      const double wanted = least(problem, n, 0, left, taken);
      ASSERT_NEAR(found, wanted, 1e-9 * (1 + std::abs(wanted)));
    }
  }
}

TEST(LinearAssignmentLoops, FaultsAreNamed) {
  Random random(0);
  Problem problem(random, 3, 4, 3, false);
  problem.used = {3, 4, 3};
  problem.doubles[2 * 12] = NAN;
  problem.floats[2 * 12] = NAN;
  std::vector<int64_t> out = problem.out();
  std::vector<AssignmentFault> faults(3);
  assignment_problem::run(problem.params(out), faults.data(), backwards);
  EXPECT_EQ(faults,
            (std::vector<AssignmentFault>{AssignmentFault::kNone, AssignmentFault::kColumns, AssignmentFault::kCost}));
  EXPECT_EQ(std::vector<int64_t>(out.begin() + 3, out.end()), (std::vector<int64_t>(6, -1)));
}

}  // namespace
}  // namespace torch_fastdet::core
