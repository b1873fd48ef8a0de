// Linear assignment on CUDA: one launch on the current stream.
#include <climits>

#include "ops/common/launch.h"
#include "ops/linear_assignment/run.h"

namespace torch_fastdet::linear_assignment_cuda {
namespace {

struct Cuda : OnDevice {
  static int64_t scratch(int64_t rows, int64_t columns) { return core::assignment_scratch(rows, columns); }

  static void run(const core::LinearAssignmentParams& p, const char* op) {
    constexpr int64_t kMost = INT_MAX / 2;
    TORCH_CHECK(p.problems <= kMost && p.rows <= kMost && p.columns <= kMost, op, ": cost has shape [", p.problems,
                ", ", p.rows, ", ", p.columns, "], but sizes of at most ", kMost, " are expected");
    check_launch(core::launch_linear_assignment(p, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_linear_assignment<Cuda>(m);
}

}  // namespace torch_fastdet::linear_assignment_cuda
