// stem_conv2d on the CPU: threads share the rows of the result, and the outputs whose weights have a gradient.
#include "core/stem_conv/stem_conv_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/stem_conv/run.h"

namespace torch_fastdet::stem_conv_cpu {
namespace {

struct Cpu : OnDevice {
  static void forward(const core::StemConvForwardParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) {
      parallel_for(0, p.sizes.batch * p.sizes.height, 1,
                   [&](int64_t begin, int64_t end) { core::stem_conv_forward_rows<decltype(zero)>(p, begin, end); });
    });
  }

  static void backward(core::StemConvBackwardParams& p, const at::TensorOptions&, const char*) {
    with_dtype(p.dtype, [&](auto zero) {
      parallel_for(0, p.sizes.outputs, 1, [&](int64_t begin, int64_t end) {
        core::stem_conv_backward_outputs<decltype(zero)>(p, begin, end);
      });
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_stem_conv<Cpu>(m);
}

}  // namespace torch_fastdet::stem_conv_cpu
