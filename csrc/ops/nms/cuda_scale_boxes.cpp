// Boxes back in original pixels on the GPU: checks, guards the device, allocates, launches.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/common/launch.h"
#include "ops/nms/checks.h"

namespace torch_fastdet {
namespace {

at::Tensor scale_boxes(const at::Tensor& boxes, const at::Tensor& letterboxes, bool xywh) {
  check_scale_boxes(boxes, letterboxes);
  const c10::cuda::CUDAGuard guard(boxes.device());
  const at::Tensor rows = as_contiguous(letterboxes, detection_type(boxes.scalar_type()));
  at::Tensor output = at::empty(boxes.sizes(), boxes.options(), at::MemoryFormat::Contiguous);
  core::ScaleBoxesParams params = scale_boxes_params(boxes, rows, xywh);
  params.output = output.mutable_data_ptr();
  check_launch(core::launch_scale_boxes(params, c10::cuda::getCurrentCUDAStream()), "scale_boxes");
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  m.impl("scale_boxes", scale_boxes);
}

}  // namespace torch_fastdet
