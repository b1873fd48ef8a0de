// RT-DETR's loss on the CPU: the core's loops on Torch's threads. A bad target is an error at once.
#include <algorithm>

#include "core/rtdetr_loss/rtdetr_loss_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/rtdetr_loss/run.h"

namespace torch_fastdet::rtdetr_loss_cpu {
namespace {

struct Cpu : OnDevice {
  static int64_t assignment(int64_t, int64_t) { return 0; }

  static void run(const core::RtdetrLossParams& p) {
    for (int64_t image = 0; image < p.images; ++image) {
      TORCH_CHECK_VALUE(p.counts[image] >= 0 && p.counts[image] <= p.most, kRtdetrLoss, ": counts[", image, "] is ",
                        p.counts[image], ", but 0 to ", p.most, " are expected");
      for (int64_t row = 0; row < p.counts[image]; ++row) {
        TORCH_CHECK_VALUE(p.class_of(image, row) >= 0, kRtdetrLoss, ": targets[", image, ", ", row, "] has class ",
                          p.targets[(image * p.most + row) * 5], ", but 0 to ", p.classes - 1, " are expected");
      }
    }
    std::fill_n(p.status, core::kRtdetrStatusSize, 0);
    with_dtype(p.dtype, [&](auto zero) { core::rtdetr_loops::forward<decltype(zero)>(p, parallel_for); });
  }
  static void run_backward(const core::RtdetrLossParams& p) {
    with_dtype(p.dtype, [&](auto zero) { core::rtdetr_loops::backward<decltype(zero)>(p, parallel_for); });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_rtdetr_loss<Cpu>(m);
}

}  // namespace torch_fastdet::rtdetr_loss_cpu
