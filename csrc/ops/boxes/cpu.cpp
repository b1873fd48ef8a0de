// Run bbox_iou and iou_loss on the CPU: the core's loops on Torch's threads.
// The pragma lets g++ turn selects into vector blends; results stay IEEE, including NaN and infinity. It precedes the
// includes, because g++ does not inline between functions of differing options.
#pragma GCC optimize("no-trapping-math")

#include "core/boxes/bbox_iou_loops.h"
#include "ops/boxes/run.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"

namespace torch_fastdet::boxes_cpu {
namespace {

struct Cpu : OnDevice {
  static int64_t loss_partials(int64_t) { return 0; }

  static void run(const core::BboxIouParams& p, const char*) {
    core::boxes_loops::bbox_iou<TorchHalves>(p, parallel_for);
  }
  static void run(const core::IouLossParams& p, const char*) {
    core::boxes_loops::iou_loss<TorchHalves>(p, parallel_for);
  }
  static void run(const core::IouBackwardParams& p, const char*) {
    core::boxes_loops::iou_backward<TorchHalves>(p, parallel_for);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_boxes<Cpu>(m);
}

}  // namespace torch_fastdet::boxes_cpu
