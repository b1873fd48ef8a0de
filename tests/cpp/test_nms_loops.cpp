// The CPU loops of non-maximum suppression against kernels/nms_problem.h.
#include <gtest/gtest.h>

#include "core/nms/decode_loops.h"
#include "core/nms/nms_loops.h"
#include "kernels/backwards.h"
#include "kernels/nms_problem.h"

namespace torch_fastdet::core::nms_problem {
namespace {

struct Loops {
  static void seed(uint64_t) {}
  static bool suppress(const Problem& problem, const NmsOutput& output, const NmsPlan&) {
    const int64_t threads = 2;  // a single image is threaded inside
    nms_loops::suppress<Halves>(problem.source, problem.options, problem.filter, output, threads, backwards);
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
