// Solve linear assignment on the CPU with the shortest augmenting paths of D. F. Crouse, "On implementing 2D
// rectangular assignment algorithms", IEEE Transactions on Aerospace and Electronic Systems 52 (2016), in float64.
// Among equally short paths it takes the one that scipy.optimize.linear_sum_assignment takes. The remaining ends are in
// a list, initially from the last to the first, and the list's last end takes the place of one that is removed. Among
// ends of equal distance, the last free one in the list wins; if none is free, the first one.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "core/linear_assignment/linear_assignment.h"

namespace torch_fastdet::core::assignment_loops {

// Solve one problem at a time, with memory for the largest one.
class Search {
 public:
  explicit Search(const LinearAssignmentParams& p)
      : cost_(p.rows * p.columns),
        start_price_(std::min(p.rows, p.columns)),
        end_of_(start_price_.size()),
        end_price_(std::max(p.rows, p.columns)),
        distance_(end_price_.size()),
        start_of_(end_price_.size()),
        came_from_(end_price_.size()),
        left_(end_price_.size()) {}

  // Write the end of each start to end_of().
  template <typename T>
  AssignmentFault run(const T* cost, const AssignmentSides& sides) {
    for (int64_t i = 0; i < sides.starts; ++i) {
      for (int64_t j = 0; j < sides.ends; ++j) {
        const double c = static_cast<double>(cost[i * sides.start_stride + j * sides.end_stride]);
        if (!(c > -std::numeric_limits<double>::infinity())) return AssignmentFault::kCost;
        cost_[i * sides.ends + j] = c;
      }
    }
    std::fill_n(start_price_.begin(), sides.starts, 0.);
    std::fill_n(end_price_.begin(), sides.ends, 0.);
    std::fill_n(end_of_.begin(), sides.starts, -1);
    std::fill_n(start_of_.begin(), sides.ends, -1);
    for (int64_t start = 0; start < sides.starts; ++start) {
      if (!add(start, sides.ends)) return AssignmentFault::kInfinite;
    }
    return AssignmentFault::kNone;
  }

  const std::vector<int64_t>& end_of() const { return end_of_; }

 private:
  // Return false if each path to a free end has a cost of inf.
  bool add(int64_t start, int64_t ends) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    std::fill_n(distance_.begin(), ends, kInfinity);
    for (int64_t place = 0; place < ends; ++place) left_[place] = ends - 1 - place;
    int64_t count = ends, at = start, found = -1;
    double reached = 0;
    while (found < 0) {
      int64_t best = -1;
      double least = kInfinity;
      for (int64_t place = 0; place < count; ++place) {
        const int64_t end = left_[place];
        const double length = reached + cost_[at * ends + end] - start_price_[at] - end_price_[end];
        if (length < distance_[end]) {
          distance_[end] = length;
          came_from_[end] = at;
        }
        const bool tie = distance_[end] == least && start_of_[end] < 0;
        if (best < 0 || distance_[end] < least || tie) {
          least = distance_[end];
          best = place;
        }
      }
      if (least == kInfinity) return false;
      reached = least;
      const int64_t end = left_[best];
      if (start_of_[end] < 0) {
        found = end;
      } else {
        at = start_of_[end];
      }
      std::swap(left_[best], left_[--count]);  // reached ends move to the back
    }
    start_price_[start] += reached;
    for (int64_t place = count; place < ends; ++place) {
      const int64_t end = left_[place];
      const double more = reached - distance_[end];
      if (start_of_[end] >= 0) start_price_[start_of_[end]] += more;
      end_price_[end] -= more;
    }
    for (int64_t end = found, from = -1; from != start;) {
      from = came_from_[end];
      start_of_[end] = from;
      std::swap(end_of_[from], end);
    }
    return true;
  }

  std::vector<double> cost_;  // (starts, ends)
  std::vector<double> start_price_;
  std::vector<int64_t> end_of_;
  std::vector<double> end_price_, distance_;
  std::vector<int64_t> start_of_, came_from_, left_;
};

// Write problem n's fault to faults[n]. If it has one, its columns are -1.
template <typename T, typename ParallelFor>
void linear_assignment(const LinearAssignmentParams& p, AssignmentFault* faults, const ParallelFor& parallel_for) {
  parallel_for(0, p.problems, 1, [&](int64_t begin, int64_t end) {
    Search search(p);
    for (int64_t n = begin; n < end; ++n) {
      int64_t* const out = p.out + n * p.columns;
      std::fill_n(out, p.columns, -1);
      const int64_t columns = p.used_columns[n % p.period];
      faults[n] = columns < 0 || columns > p.columns ? AssignmentFault::kColumns : AssignmentFault::kNone;
      if (faults[n] != AssignmentFault::kNone) continue;
      const AssignmentSides sides = assignment_sides(p, columns);
      faults[n] = search.run(static_cast<const T*>(p.cost) + n * p.problem_stride, sides);
      if (faults[n] != AssignmentFault::kNone) continue;
      for (int64_t i = 0; i < sides.starts; ++i) {
        const int64_t other = search.end_of()[i];
        out[sides.from_rows ? other : i] = sides.from_rows ? i : other;
      }
    }
  });
}

}  // namespace torch_fastdet::core::assignment_loops
