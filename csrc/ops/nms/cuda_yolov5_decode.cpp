// YOLOv5 decode on the GPU: checks, guards the device, allocates, launches.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "core/nms/decode.h"
#include "ops/common/launch.h"
#include "ops/nms/checks.h"

namespace torch_fastdet {
namespace {

at::Tensor yolov5_decode(at::TensorList heads, const at::Tensor& anchors, at::ArrayRef<double> strides, int64_t nm) {
  NmsRequest request = check_yolov5_heads(heads, anchors, strides, nm, "yolov5_decode");
  const c10::cuda::CUDAGuard guard(heads[0].device());
  fill_heads(request, heads);
  fill_anchors(request, true);
  const CandidateSource& source = request.source;
  at::Tensor output = at::empty({source.images, source.anchors, 5 + source.classes + nm}, heads[0].options(),
                                at::MemoryFormat::Contiguous);
  const core::DecodeParams params{source, output.mutable_data_ptr()};
  check_launch(core::launch_yolov5_decode(params, c10::cuda::getCurrentCUDAStream()), "yolov5_decode");
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  m.impl("yolov5_decode", yolov5_decode);
}

}  // namespace torch_fastdet
