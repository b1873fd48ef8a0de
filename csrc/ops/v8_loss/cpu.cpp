// Compute the v8 losses on the CPU: check the rows and run the core's loops.
// The pragma lets g++ turn selects into vector blends; results stay IEEE. It precedes the includes, because g++ does
// not inline between functions of differing options.
#pragma GCC optimize("no-trapping-math")

#include "core/v8_loss/v8_keypoint_loops.h"
#include "core/v8_loss/v8_loss_loops.h"
#include "core/v8_loss/v8_mask_loops.h"
#include "core/v8_loss/v8_masked_loops.h"
#include "core/v8_loss/v8_obb_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/common/targets.h"
#include "ops/v8_loss/run.h"

namespace torch_fastdet::v8_loss_cpu {
namespace {

using namespace core;

// Check the valid rows and return their number.
template <typename Params>
int64_t checked_rows(const Params& params, const char* op) {
  const int64_t count = targets_in_use(params.num_targets, params.n, op);
  check_target_rows(
      count, params.heads.bs, params.heads.nc, op, [&](int64_t i) { return v8_row(params, i); }, v8_target_fault);
  return count;
}

struct Cpu : OnDevice {
  static int64_t slot_blocks(const V8LossParams&) { return 0; }
  static int64_t class_blocks(const V8LossParams&) { return 0; }
  static void run(const V8LossParams& params, const char* op) {
    const int64_t count = checked_rows(params, op);
    with_dtype(params.heads.dtype, [&](auto zero) { v8_loops::forward<decltype(zero)>(params, count, parallel_for); });
  }
  static void run(const V8LossBackwardParams& params, const char*) {
    with_dtype(params.heads.dtype, [&](auto zero) { v8_loops::backward<decltype(zero)>(params, parallel_for); });
  }
  static void run(const V8ObbLossParams& params, const char* op) {
    const int64_t count = checked_rows(params, op);
    with_dtype(params.heads.dtype,
               [&](auto zero) { v8_loops::obb_forward<decltype(zero)>(params, count, parallel_for); });
  }
  static void run(const V8ObbLossBackwardParams& params, const char*) {
    with_dtype(params.heads.dtype, [&](auto zero) { v8_loops::obb_backward<decltype(zero)>(params, parallel_for); });
  }
  static void run(const V8PosedLossParams& params, const char* op) {
    const int64_t count = checked_rows(params, op);
    with_dtype(params.heads.dtype, [&](auto zero) { v8_loops::forward<decltype(zero)>(params, count, parallel_for); });
  }
  static void run(const V8MaskedLossParams& params, const char* op) {
    const int64_t count = checked_rows(params, op);
    with_dtype(params.heads.dtype,
               [&](auto zero) { v8_loops::masked_forward<decltype(zero)>(params, count, parallel_for); });
  }
  static void run(const V8MaskLossParams& params, const char* op) {
    const int64_t count = targets_in_use(params.num_targets, params.n, op);
    with_dtype(params.problem.dtype,
               [&](auto zero) { v8_loops::mask_forward<decltype(zero)>(params, count, parallel_for); });
  }
  static void run(const V8MaskLossBackwardParams& params, const char*) {
    with_dtype(params.problem.dtype, [&](auto zero) { v8_loops::mask_backward<decltype(zero)>(params, parallel_for); });
  }
  static void run(const V8KeypointLossParams& params, const char*) {
    with_dtype(params.problem.dtype, [&](auto zero) { v8_loops::keypoint_forward<decltype(zero)>(params); });
  }
  static void run(const V8KeypointLossBackwardParams& params, const char*) {
    with_dtype(params.problem.dtype, [&](auto zero) { v8_loops::keypoint_backward<decltype(zero)>(params); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_v8_loss<Cpu>(m);
}

}  // namespace torch_fastdet::v8_loss_cpu
