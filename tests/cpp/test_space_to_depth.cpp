// Compare the CPU loops of space_to_depth with kernels/space_to_depth_problem.h.
#include <gtest/gtest.h>

#include "core/space_to_depth/space_to_depth_loops.h"
#include "kernels/backwards.h"
#include "kernels/space_to_depth_problem.h"

namespace torch_fastdet::core {
namespace {

struct Loops {
  static void seed(uint64_t) {}
  // Call f(zero of the source's type, zero of the target's).
  template <typename F>
  static bool with_types(const SpaceToDepthParams& params, F&& f) {
    with_dtype<Halves>(params.source_dtype,
                       [&](auto from) { with_dtype<Halves>(params.target_dtype, [&](auto to) { f(from, to); }); });
    return true;
  }
  static bool forward(const SpaceToDepthParams& params) {
    const auto run = [&](auto from, auto to) {
      space_to_depth_loops::forward<decltype(from), decltype(to)>(params, backwards);
    };
    if (!params.bytes) return with_types(params, run);
    with_dtype<Halves>(params.target_dtype, [&](auto to) { run(uint8_t{}, to); });
    return true;
  }
  static bool backward(const SpaceToDepthParams& params) {
    return with_types(params, [&](auto from, auto to) {
      space_to_depth_loops::backward<decltype(from), decltype(to)>(params, backwards);
    });
  }
};

TEST(SpaceToDepthLoops, RandomShapesAndTypes) {
  for (uint64_t seed = 0; seed < rounds(100) && !HasFailure(); ++seed) space_to_depth_problem::check<Loops>(seed);
}

}  // namespace
}  // namespace torch_fastdet::core
