// Compare the kernels of v8_loss with v8_loss_problem.h.
#include <gtest/gtest.h>

#include "dtypes.h"
#include "emulator.h"
#include "v8_loss_problem.h"

namespace torch_fastdet::core {
namespace {

struct Kernels {
  static constexpr bool kFaults = true;
  static int64_t slot_blocks(const V8LossParams& params) { return v8_slot_blocks(params); }
  static int64_t class_blocks(const V8LossParams& params) { return v8_class_blocks(params); }
  static bool forward(const V8LossParams& params, int64_t) { return launch_v8_loss(params, nullptr) == cudaSuccess; }
  static bool backward(const V8LossBackwardParams& params) {
    return launch_v8_loss_backward(params, nullptr) == cudaSuccess;
  }
};

TEST(V8LossKernels, RandomHeadsAndTargets) {
  for_each_seed(48, kEveryDtype, [](auto zero, uint64_t seed, DType dtype) {
    emulator::seed(seed);
    v8_problem::check<Kernels, decltype(zero)>(seed, dtype);
  });
}

}  // namespace
}  // namespace torch_fastdet::core
