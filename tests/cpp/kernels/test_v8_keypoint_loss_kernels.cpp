// Compare the kernels of v8_keypoint_loss with v8_keypoint_problem.h.
#include <gtest/gtest.h>

#include "dtypes.h"
#include "emulator.h"
#include "v8_keypoint_problem.h"

namespace torch_fastdet::core {
namespace {

struct Kernels {
  static bool forward(const V8KeypointLossParams& params) {
    return launch_v8_keypoint_loss(params, nullptr) == cudaSuccess;
  }
  static bool backward(const V8KeypointLossBackwardParams& params) {
    return launch_v8_keypoint_loss_backward(params, nullptr) == cudaSuccess;
  }
};

TEST(V8KeypointLossKernels, RandomKeypoints) {
  for_each_seed(32, kEveryDtype, [](auto zero, uint64_t seed, DType dtype) {
    emulator::seed(seed);
    v8_keypoint_problem::check<Kernels, decltype(zero)>(seed, dtype);
  });
}

}  // namespace
}  // namespace torch_fastdet::core
