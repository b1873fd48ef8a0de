// Solve a batch of rectangular assignment problems with minimum cost, choosing as SciPy does among several optima.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/common/host_device.h"

namespace torch_fastdet::core {

// kCost: NaN or -inf. kInfinite: every assignment has a cost of inf.
enum class AssignmentFault : int32_t { kNone, kCost, kColumns, kInfinite };

constexpr int kAssignmentStatusSize = 2;

// Problem n is the first used_columns[n % period] columns of cost[n]. `cost` is float or double.
struct LinearAssignmentParams {
  int64_t problems, rows, columns;
  int64_t problem_stride, row_stride, column_stride;  // strides of cost, in elements
  const void* cost;
  DType dtype;
  const int64_t* used_columns;  // (period), of problems n, n + period, ...
  int64_t period;
  int64_t* out;   // (problems, columns): the row of each column, or -1
  void* scratch;  // GPU only: assignment_scratch bytes per problem
  // Hold the number of problems with bad costs or columns, and the first one as assignment_fault_code. It may be null.
  int64_t* status;
};

// Return a code that is greater for a lower problem.
TORCH_FASTDET_HOST_DEVICE int64_t assignment_fault_code(int64_t problem, AssignmentFault fault) {
  return ((int64_t{1} << 60) - problem) * 4 + static_cast<int64_t>(fault);
}

// The search begins with the shorter side, or the rows: it adds one "start" after another and gives each an "end".
struct AssignmentSides {
  int64_t starts, ends;
  int64_t start_stride, end_stride;
  bool from_rows;
};

TORCH_FASTDET_HOST_DEVICE AssignmentSides assignment_sides(const LinearAssignmentParams& p, int64_t columns) {
  if (columns < p.rows) return {columns, p.rows, p.column_stride, p.row_stride, false};
  return {p.rows, columns, p.row_stride, p.column_stride, true};
}

constexpr int64_t kMostRegisterEnds = 960;  // as many as fit in a warp's registers

// Return the bytes per problem: prices and partners of the starts; prices, distances and three numbers of the ends.
TORCH_FASTDET_HOST_DEVICE int64_t assignment_scratch(int64_t rows, int64_t columns) {
  const int64_t ends = rows > columns ? rows : columns, starts = rows > columns ? columns : rows;
  return ends <= kMostRegisterEnds ? 0 : ceil_div(starts, 32) * 32 * 12 + ceil_div(ends, 32) * 32 * 28;
}

cudaError_t launch_linear_assignment(const LinearAssignmentParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
