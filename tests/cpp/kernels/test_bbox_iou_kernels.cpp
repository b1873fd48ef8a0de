// Compare the kernels of bbox_iou with bbox_iou_problem.h.
#include <gtest/gtest.h>

#include "bbox_iou_problem.h"
#include "emulator.h"

namespace torch_fastdet::core {
namespace {

struct Kernels {
  static void seed(uint64_t seed) { emulator::seed(seed); }
  static bool run(const BboxIouParams& params) { return launch_bbox_iou(params, nullptr) == cudaSuccess; }
  static bool run(const IouLossParams& params) {
    bool clusters = true;
    if (iou_loss_clusters(clusters) != cudaSuccess || clusters) return false;
    return launch_iou_loss(params, nullptr) == cudaSuccess;
  }
  static bool run(const IouBackwardParams& params) { return launch_iou_backward(params, nullptr) == cudaSuccess; }
};

TEST(BboxIouKernels, RandomPairs) {
  boxes_problem::check_random_pairs<Kernels>(rounds(20));
}

}  // namespace
}  // namespace torch_fastdet::core
