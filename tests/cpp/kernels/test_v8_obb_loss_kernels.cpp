// Compare the kernels of v8_obb_loss with the CPU loops.
#include <gtest/gtest.h>

#include "dtypes.h"
#include "emulator.h"
#include "v8_obb_problem.h"

namespace torch_fastdet::core {
namespace {

struct Kernels {
  static int64_t slot_blocks(const V8ObbLossParams& params) { return v8_obb_slot_blocks(params); }
  static int64_t class_blocks(const V8ObbLossParams& params) { return v8_class_blocks(params); }
  static bool forward(const V8ObbLossParams& params, int64_t) {
    return launch_v8_obb_loss(params, nullptr) == cudaSuccess;
  }
  static bool backward(const V8ObbLossBackwardParams& params) {
    return launch_v8_obb_loss_backward(params, nullptr) == cudaSuccess;
  }
};

TEST(V8ObbLossKernels, RandomHeadsAndTargets) {
  for_each_seed(24, {DType::kFloat32, DType::kFloat32, DType::kFloat64}, [](auto zero, uint64_t seed, DType dtype) {
    emulator::seed(seed);
    v8_obb_problem::check<Kernels, v8_obb_problem::Loops<decltype(zero)>, decltype(zero)>(seed, dtype);
  });
}

}  // namespace
}  // namespace torch_fastdet::core
