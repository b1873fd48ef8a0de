// space_to_depth on the CPU: the core's loops on Torch's threads.
#include "core/space_to_depth/space_to_depth_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/space_to_depth/run.h"

namespace torch_fastdet::space_to_depth_cpu {
namespace {

// Calls f(zero of the source's type, zero of the target's).
template <typename F>
void with_types(const core::SpaceToDepthParams& p, F&& f) {
  with_dtype(p.source_dtype, [&](auto from) { with_dtype(p.target_dtype, [&](auto to) { f(from, to); }); });
}

struct Cpu : OnDevice {
  static void forward(const core::SpaceToDepthParams& p, const char*) {
    const auto run = [&](auto from, auto to) {
      core::space_to_depth_loops::forward<decltype(from), decltype(to)>(p, parallel_for);
    };
    if (p.bytes) {
      with_dtype(p.target_dtype, [&](auto to) { run(uint8_t{}, to); });
    } else {
      with_types(p, run);
    }
  }
  static void backward(const core::SpaceToDepthParams& p, const char*) {
    with_types(p, [&](auto from, auto to) {
      core::space_to_depth_loops::backward<decltype(from), decltype(to)>(p, parallel_for);
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_space_to_depth<Cpu>(m);
}

}  // namespace torch_fastdet::space_to_depth_cpu
