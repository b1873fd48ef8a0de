// Compare the CPU loops of bbox_iou and iou_loss with kernels/bbox_iou_problem.h.
#include <gtest/gtest.h>

#include "core/boxes/bbox_iou_loops.h"
#include "kernels/backwards.h"
#include "kernels/bbox_iou_problem.h"

namespace torch_fastdet::core {
namespace {

struct Loops {
  static void seed(uint64_t) {}
  static bool run(const BboxIouParams& params) {
    boxes_loops::bbox_iou<Halves>(params, backwards);
    return true;
  }
  static bool run(const IouLossParams& params) {
    boxes_loops::iou_loss<Halves>(params, backwards);
    return true;
  }
  static bool run(const IouBackwardParams& params) {
    boxes_loops::iou_backward<Halves>(params, backwards);
    return true;
  }
};

TEST(BboxIouLoops, RandomPairs) {
  boxes_problem::check_random_pairs<Loops>(rounds(20));
}

}  // namespace
}  // namespace torch_fastdet::core
