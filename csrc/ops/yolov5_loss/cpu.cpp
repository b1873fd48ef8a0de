// The YOLOv5 loss on the CPU: checks the rows, and runs the core's loops.
// Lets g++ turn selects into vector blends; results stay IEEE. Before any include, because g++ does not inline between
// functions of differing options.
#pragma GCC optimize("no-trapping-math")

#include <algorithm>

#include "core/yolov5_loss/yolov5_loss_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/yolov5_loss/run.h"

namespace torch_fastdet::yolov5_loss_cpu {
namespace {

using namespace core;

int64_t targets_in_use(const Yolov5LossParams& params) {
  if (!params.num_targets) return params.nt;
  TORCH_CHECK_VALUE(*params.num_targets >= 0 && *params.num_targets <= params.nt, "yolov5_loss: num_targets is ",
                    *params.num_targets, ", but targets has ", params.nt, " rows");
  return *params.num_targets;
}

void check_rows(const Yolov5LossParams& params, int64_t count) {
  static constexpr const char* kWanted[] = {"an image index of the batch", "a class index below the number of classes",
                                            "a finite number"};
  static constexpr const char* kColumns[] = {"image", "class", "x", "y", "w", "h"};
  for (int64_t i = 0; i < count; ++i) {
    const float* row = params.targets + 6 * i;
    const int fault = yolov5_target_fault(row, params.bs, params.nc);
    TORCH_CHECK_VALUE(fault == 0, "yolov5_loss: targets row ", i, ", column ", fault - 1, " (", kColumns[fault - 1],
                      ") is ", row[fault - 1], ", but ", kWanted[std::min(fault - 1, 2)], " is expected (batch ",
                      params.bs, ", ", params.nc, " classes)");
  }
}

struct Cpu : OnDevice {
  static int64_t scratch(const Yolov5LossParams&) { return 0; }
  static void run(const Yolov5LossParams& params, const at::Tensor&) {
    const int64_t targets = targets_in_use(params);
    check_rows(params, targets);
    with_dtype(params.dtype, [&](auto zero) { yolov5_loops::forward<decltype(zero)>(params, targets, parallel_for); });
  }
  static void run(const Yolov5LossBackwardParams& params) {
    with_dtype(params.dtype, [&](auto zero) { yolov5_loops::backward<decltype(zero)>(params, parallel_for); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_yolov5_loss<Cpu>(m);
}

}  // namespace torch_fastdet::yolov5_loss_cpu
