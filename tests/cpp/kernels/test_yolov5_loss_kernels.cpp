// Compare the kernels of yolov5_loss with yolov5_loss_problem.h.
#include <gtest/gtest.h>

#include "dtypes.h"
#include "emulator.h"
#include "yolov5_loss_problem.h"

namespace torch_fastdet::core {
namespace {

struct Kernels {
  static constexpr bool kFaults = true;
  static int64_t match_blocks(const Yolov5LossParams& params) { return yolov5_match_blocks(params); }
  static int64_t object_blocks(const Yolov5LossParams& params) { return yolov5_object_blocks(params); }
  static bool forward(const Yolov5LossParams& params, int64_t) {
    return launch_yolov5_loss(params, nullptr) == cudaSuccess;
  }
  static bool backward(const Yolov5LossBackwardParams& params) {
    return launch_yolov5_loss_backward(params, nullptr) == cudaSuccess;
  }
};

TEST(Yolov5LossKernels, RandomHeadsAndTargets) {
  for_each_seed(60, kEveryDtype, [](auto zero, uint64_t seed, DType dtype) {
    emulator::seed(seed);
    yolov5_problem::check<Kernels, decltype(zero)>(seed, dtype);
  });
}

}  // namespace
}  // namespace torch_fastdet::core
