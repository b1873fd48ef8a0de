// Run post-processing on CUDA, on the current stream. Suppression uses one workspace.
#include "core/nms/nms_launch.h"
#include "ops/common/launch.h"
#include "ops/nms/run.h"

namespace torch_fastdet::nms_cuda {
namespace {

struct Cuda : OnDevice {
  static constexpr int64_t kMaxImages = 65535;
  static constexpr bool kReadsDeviceAnchors = true;

  static void run(const NmsRequest& request, const core::NmsOutput& output, const at::Tensor& input, const char* op) {
    int shared_limit = 0;
    check_launch(cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, input.get_device()),
                 op);
    const core::NmsPlan plan = core::plan_nms(request.source, request.options, shared_limit);
    at::Tensor workspace = at::empty({static_cast<int64_t>(plan.bytes)}, input.options().dtype(at::kByte));
    check_launch(core::launch_nms(request.source, request.options, request.filter, output, plan,
                                  workspace.mutable_data_ptr(), current_stream()),
                 op);
  }
  static void run(const core::DecodeParams& params, const char* op) {
    check_launch(core::launch_yolov5_decode(params, current_stream()), op);
  }
  static void run(const core::FilterParams& params, const char* op) {
    check_launch(core::launch_filter(params, current_stream()), op);
  }
  static void run(const core::ScaleBoxesParams& params, const char* op) {
    check_launch(core::launch_scale_boxes(params, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_nms<Cuda>(m);
}

}  // namespace torch_fastdet::nms_cuda
