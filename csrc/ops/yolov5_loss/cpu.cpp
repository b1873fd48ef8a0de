// Compute the YOLOv5 loss on the CPU: check the rows and run the core's loops.
// The pragma lets g++ turn selects into vector blends; results stay IEEE. It precedes the includes, because g++ does
// not inline between functions of differing options.
#pragma GCC optimize("no-trapping-math")

#include "core/yolov5_loss/yolov5_loss_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/common/targets.h"
#include "ops/yolov5_loss/run.h"

namespace torch_fastdet::yolov5_loss_cpu {
namespace {

using namespace core;

struct Cpu : OnDevice {
  static int64_t scratch(const Yolov5LossParams&) { return 0; }
  static void run(const Yolov5LossParams& params, const at::Tensor&) {
    const int64_t count = targets_in_use(params.num_targets, params.nt, "yolov5_loss");
    check_target_rows(
        count, params.bs, params.nc, "yolov5_loss", [&](int64_t i) { return params.targets + 6 * i; },
        yolov5_target_fault);
    with_dtype(params.dtype, [&](auto zero) { yolov5_loops::forward<decltype(zero)>(params, count, parallel_for); });
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
