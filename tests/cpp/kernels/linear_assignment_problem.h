// Draw random assignment problems with few different costs, so that many assignments are equally good. Some problems
// cannot be solved.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "core/common/cpu_types.h"
#include "core/linear_assignment/linear_assignment_loops.h"
#include "half.h"
#include "random.h"

namespace torch_fastdet::core::assignment_problem {

struct Problem {
  int64_t problems, rows, columns;
  bool rows_first, is_double;
  std::vector<double> doubles;
  std::vector<float> floats;
  std::vector<int64_t> used;

  // If `faulty`, some costs are not finite, and some columns are missing.
  Problem(Random& random, int64_t problems, int64_t rows, int64_t columns, bool faulty)
      : problems(problems), rows(rows), columns(columns), rows_first(random.chance(50)), is_double(random.chance(50)) {
    const int64_t values = random.one_of({1, 2, 5, 1000, 1 << 30});
    for (int64_t i = 0; i < problems * rows * columns; ++i) {
      double cost = static_cast<double>(random.below(values)) * 0.1 - (random.chance(50) ? 0. : 0.2);
      if (faulty && random.chance(1)) cost = random.one_of({NAN, INFINITY, -INFINITY});
      doubles.push_back(cost);
      floats.push_back(static_cast<float>(cost));
    }
    for (int64_t n = 0; n < problems; ++n) {
      used.push_back(faulty && random.chance(10) ? random.one_of({int64_t{-1}, columns + 1})
                                                 : random.below(columns + 1));
    }
  }

  std::vector<int64_t> out() const { return std::vector<int64_t>(problems * columns, -7); }

  LinearAssignmentParams params(std::vector<int64_t>& out) const {
    LinearAssignmentParams p{};
    p.problems = problems;
    p.rows = rows;
    p.columns = columns;
    p.problem_stride = rows * columns;
    p.row_stride = rows_first ? 1 : columns;
    p.column_stride = rows_first ? rows : 1;
    p.cost = is_double ? static_cast<const void*>(doubles.data()) : floats.data();
    p.dtype = is_double ? DType::kFloat64 : DType::kFloat32;
    p.used_columns = used.data();
    p.period = problems;
    p.out = out.data();
    return p;
  }

  double cost(int64_t n, int64_t row, int64_t column) const {
    const int64_t at = n * rows * columns + (rows_first ? column * rows + row : row * columns + column);
    return is_double ? doubles[at] : floats[at];
  }
};

template <typename ParallelFor>
void run(const LinearAssignmentParams& p, AssignmentFault* faults, const ParallelFor& parallel_for) {
  with_dtype<Halves>(p.dtype,
                     [&](auto zero) { assignment_loops::linear_assignment<decltype(zero)>(p, faults, parallel_for); });
}

}  // namespace torch_fastdet::core::assignment_problem
