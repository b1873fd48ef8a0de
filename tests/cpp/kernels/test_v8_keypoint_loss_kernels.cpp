// The kernels of v8_keypoint_loss against v8_keypoint_problem.h.
#include <gtest/gtest.h>

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
  for (uint64_t seed = 0; seed < rounds(32) && !HasFailure(); ++seed) {
    emulator::seed(seed);
    switch (seed % 4) {
      case 0:
        v8_keypoint_problem::check<Kernels, float>(seed, DType::kFloat16);
        break;
      case 1:
        v8_keypoint_problem::check<Kernels, float>(seed, DType::kBFloat16);
        break;
      case 2:
        v8_keypoint_problem::check<Kernels, float>(seed, DType::kFloat32);
        break;
      default:
        v8_keypoint_problem::check<Kernels, double>(seed, DType::kFloat64);
    }
  }
}

}  // namespace
}  // namespace torch_fastdet::core
