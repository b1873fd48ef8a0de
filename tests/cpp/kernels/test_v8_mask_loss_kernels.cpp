// Compare the kernels of v8_mask_loss with v8_mask_problem.h.
#include <gtest/gtest.h>

#include "dtypes.h"
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
  for_each_seed(16, kEveryDtype, [](auto zero, uint64_t seed, DType dtype) {
    emulator::seed(seed);
    v8_mask_problem::check<Kernels, decltype(zero)>(seed, dtype);
  });
}

}  // namespace
}  // namespace torch_fastdet::core
