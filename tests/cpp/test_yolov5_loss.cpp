// Compare the CPU loops of yolov5_loss with kernels/yolov5_loss_problem.h.
#include <gtest/gtest.h>

#include "core/yolov5_loss/yolov5_loss_loops.h"
#include "kernels/backwards.h"
#include "kernels/yolov5_loss_problem.h"

namespace torch_fastdet::core {
namespace {

template <typename T>
struct Loops {
  static constexpr bool kFaults = false;
  static int64_t match_blocks(const Yolov5LossParams&) { return 0; }
  static int64_t object_blocks(const Yolov5LossParams&) { return 0; }
  static bool forward(const Yolov5LossParams& params, int64_t targets) {
    yolov5_loops::forward<T>(params, targets, backwards);
    return true;
  }
  static bool backward(const Yolov5LossBackwardParams& params) {
    yolov5_loops::backward<T>(params, backwards);
    return true;
  }
};

TEST(Yolov5LossLoops, RandomHeadsAndTargets) {
  for (uint64_t seed = 0; seed < rounds(60) && !HasFailure(); ++seed) {
    switch (seed % 4) {
      case 0:
        yolov5_problem::check<Loops<Float16>, float>(seed, DType::kFloat16);
        break;
      case 1:
        yolov5_problem::check<Loops<BFloat16>, float>(seed, DType::kBFloat16);
        break;
      case 2:
        yolov5_problem::check<Loops<float>, float>(seed, DType::kFloat32);
        break;
      default:
        yolov5_problem::check<Loops<double>, double>(seed, DType::kFloat64);
    }
  }
}

}  // namespace
}  // namespace torch_fastdet::core
