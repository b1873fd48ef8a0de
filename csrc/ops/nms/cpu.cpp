// Run post-processing on the CPU: the core's loops on Torch's threads.
#include <limits>

#include "core/nms/decode_loops.h"
#include "core/nms/nms_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/nms/run.h"

namespace torch_fastdet::nms_cpu {
namespace {

struct Cpu : OnDevice {
  static constexpr int64_t kMaxImages = std::numeric_limits<int64_t>::max();
  static constexpr bool kReadsDeviceAnchors = false;

  static void run(const NmsRequest& request, const core::NmsOutput& output, const at::Tensor&, const char*) {
    core::nms_loops::suppress<TorchHalves>(request.source, request.options, request.filter, output,
                                           at::get_num_threads(), parallel_for);
  }
  static void run(const core::DecodeParams& params, const char*) {
    with_dtype(params.source.dtype, [&](auto zero) { core::nms_loops::decode<decltype(zero)>(params, parallel_for); });
  }
  static void run(const core::FilterParams& params, const char*) {
    with_dtype(params.dtype, [&](auto zero) {
      parallel_for(0, params.images, 1, [&](int64_t begin, int64_t end) {
        for (int64_t image = begin; image < end; ++image) core::filter_image<decltype(zero)>(params, image);
      });
    });
  }
  static void run(const core::ScaleBoxesParams& params, const char*) {
    with_dtype(params.dtype, [&](auto zero) {
      parallel_for(0, params.images * params.count, 2048, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) core::scale_one_box<decltype(zero)>(params, i);
      });
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_nms<Cpu>(m);
}

}  // namespace torch_fastdet::nms_cpu
