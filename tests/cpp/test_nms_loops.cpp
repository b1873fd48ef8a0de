// Run the CPU loops of non-maximum suppression in another order of threads, over kernels/nms_problem.h.
#include <gtest/gtest.h>

#include "core/nms/decode_loops.h"
#include "kernels/backwards.h"
#include "kernels/nms_problem.h"

namespace torch_fastdet::core::nms_problem {
namespace {

struct Loops {
  static void seed(uint64_t) {}
  static bool suppress(const Problem& problem, const NmsOutput& output, const NmsPlan&) {
    suppress_by_loops(problem, output, 2, backwards);
    return true;
  }
  static bool decode(const DecodeParams& params) {
    with_dtype<Halves>(params.source.dtype, [&](auto zero) { nms_loops::decode<decltype(zero)>(params, backwards); });
    return true;
  }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Loops, Nms, Loops);

}  // namespace
}  // namespace torch_fastdet::core::nms_problem
