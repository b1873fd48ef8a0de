// Compare the kernels of deformable attention with deformable_attention_problem.h.
#include <gtest/gtest.h>

#include "deformable_attention_problem.h"
#include "emulator.h"

namespace torch_fastdet::core {
namespace {

struct Kernels {
  static void seed(uint64_t seed) { emulator::seed(seed); }
  static bool run(const DeformableAttentionParams& params) {
    return launch_deformable_attention(params, nullptr) == cudaSuccess;
  }
  static bool run(const DeformableAttentionBackwardParams& params) {
    return launch_deformable_attention_backward(params, nullptr) == cudaSuccess;
  }
};

TEST(DeformableAttentionKernels, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(60) && !HasFailure(); ++seed) deformable_problem::check<Kernels>(seed);
}

}  // namespace
}  // namespace torch_fastdet::core
