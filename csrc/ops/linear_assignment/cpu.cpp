// Linear assignment on the CPU: the core's loops on Torch's threads. What cannot be assigned is an error at once.
#include <algorithm>
#include <vector>

#include "core/linear_assignment/linear_assignment_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/linear_assignment/run.h"

namespace torch_fastdet::linear_assignment_cpu {
namespace {

struct Cpu : OnDevice {
  static int64_t scratch(int64_t, int64_t) { return 0; }

  static void run(const core::LinearAssignmentParams& p, const char* op) {
    std::vector<core::AssignmentFault> faults(p.problems);
    with_dtype(p.dtype, [&](auto zero) {
      core::assignment_loops::linear_assignment<decltype(zero)>(p, faults.data(), parallel_for);
    });
    std::fill_n(p.status, core::kAssignmentStatusSize, 0);
    for (int64_t n = 0; n < p.problems; ++n) {
      TORCH_CHECK_VALUE(faults[n] != core::AssignmentFault::kColumns, op, ": columns[", n, "] is ", p.used_columns[n],
                        ", but 0 to ", p.columns, " are expected");
      TORCH_CHECK_VALUE(faults[n] != core::AssignmentFault::kCost, op, ": cost[", n,
                        "] has a NaN or infinite value, but finite numbers are expected");
    }
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_linear_assignment<Cpu>(m);
}

}  // namespace torch_fastdet::linear_assignment_cpu
