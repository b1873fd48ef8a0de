// The v8 losses on the CPU: checks the rows, and runs the core's loops.
// Lets g++ turn selects into vector blends; results stay IEEE. Before any include, because g++ does not inline between
// functions of differing options.
#pragma GCC optimize("no-trapping-math")

#include "core/v8_loss/v8_keypoint_loops.h"
#include "core/v8_loss/v8_loss_loops.h"
#include "core/v8_loss/v8_mask_loops.h"
#include "core/v8_loss/v8_obb_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/v8_loss/run.h"

namespace torch_fastdet::v8_loss_cpu {
namespace {

using namespace core;

template <typename Params>
int64_t targets_in_use(const Params& params, const char* op) {
  if (!params.num_targets) return params.n;
  TORCH_CHECK_VALUE(*params.num_targets >= 0 && *params.num_targets <= params.n, op, ": num_targets is ",
                    *params.num_targets, ", but targets has ", params.n, " rows");
  return *params.num_targets;
}

// How many rows are in use, all of which are good.
template <typename Params>
int64_t checked_rows(const Params& params, const char* op) {
  static constexpr const char* kWanted[] = {"an image index of the batch", "a class index below the number of classes"};
  static constexpr const char* kColumns[] = {"image", "class"};
  const int64_t count = targets_in_use(params, op);
  for (int64_t i = 0; i < count; ++i) {
    const float* row = v8_row(params, i);
    const int fault = v8_target_fault(row, params.heads.bs, params.heads.nc);
    TORCH_CHECK_VALUE(fault == 0, op, ": targets row ", i, ", column ", fault - 1, " (", kColumns[fault - 1], ") is ",
                      row[fault - 1], ", but ", kWanted[fault - 1], " is expected (batch ", params.heads.bs, ", ",
                      params.heads.nc, " classes)");
  }
  return count;
}

struct Cpu : OnDevice {
  static int64_t slot_blocks(const V8LossParams&) { return 0; }
  static int64_t class_blocks(const V8LossParams&) { return 0; }
  static void run(const V8LossParams& params) {
    const int64_t count = checked_rows(params, "v8_loss");
    with_dtype(params.heads.dtype, [&](auto zero) { v8_loops::forward<decltype(zero)>(params, count, parallel_for); });
  }
  static void run(const V8LossBackwardParams& params) {
    with_dtype(params.heads.dtype, [&](auto zero) { v8_loops::backward<decltype(zero)>(params, parallel_for); });
  }
  static void run(const V8ObbLossParams& params) {
    const int64_t count = checked_rows(params, "v8_obb_loss");
    with_dtype(params.heads.dtype,
               [&](auto zero) { v8_loops::obb_forward<decltype(zero)>(params, count, parallel_for); });
  }
  static void run(const V8ObbLossBackwardParams& params) {
    with_dtype(params.heads.dtype, [&](auto zero) { v8_loops::obb_backward<decltype(zero)>(params, parallel_for); });
  }
  static void run(const V8MaskLossParams& params) {
    const int64_t count = targets_in_use(params, "v8_mask_loss");
    with_dtype(params.problem.dtype,
               [&](auto zero) { v8_loops::mask_forward<decltype(zero)>(params, count, parallel_for); });
  }
  static void run(const V8MaskLossBackwardParams& params) {
    with_dtype(params.problem.dtype, [&](auto zero) { v8_loops::mask_backward<decltype(zero)>(params, parallel_for); });
  }
  static void run(const V8KeypointLossParams& params) {
    with_dtype(params.problem.dtype, [&](auto zero) { v8_loops::keypoint_forward<decltype(zero)>(params); });
  }
  static void run(const V8KeypointLossBackwardParams& params) {
    with_dtype(params.problem.dtype, [&](auto zero) { v8_loops::keypoint_backward<decltype(zero)>(params); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_v8_loss<Cpu>(m);
}

}  // namespace torch_fastdet::v8_loss_cpu
