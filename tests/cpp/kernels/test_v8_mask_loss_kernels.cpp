// The kernels of v8_mask_loss against v8_mask_problem.h.
#include <gtest/gtest.h>

#include "emulator.h"
#include "v8_mask_problem.h"

namespace torch_fastdet::core {
namespace {

struct Kernels {
  static bool forward(const V8MaskLossParams& params, int64_t) {
    return launch_v8_mask_loss(params, nullptr) == cudaSuccess;
  }
  static bool backward(const V8MaskLossBackwardParams& params) {
    return launch_v8_mask_loss_backward(params, nullptr) == cudaSuccess;
  }
};

TEST(V8MaskLossKernels, RandomBoxesAndMasks) {
  for (uint64_t seed = 0; seed < rounds(16) && !HasFailure(); ++seed) {
    emulator::seed(seed);
    switch (seed % 4) {
      case 0:
        v8_mask_problem::check<Kernels, float>(seed, DType::kFloat16);
        break;
      case 1:
        v8_mask_problem::check<Kernels, float>(seed, DType::kBFloat16);
        break;
      case 2:
        v8_mask_problem::check<Kernels, float>(seed, DType::kFloat32);
        break;
      default:
        v8_mask_problem::check<Kernels, double>(seed, DType::kFloat64);
    }
  }
}

}  // namespace
}  // namespace torch_fastdet::core
