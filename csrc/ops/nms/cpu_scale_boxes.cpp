// Boxes back in original pixels on the CPU: checks, allocates, threads over boxes.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "core/nms/scale_boxes_math.h"
#include "ops/nms/checks.h"

namespace torch_fastdet {
namespace {

at::Tensor scale_boxes(const at::Tensor& boxes, const at::Tensor& letterboxes, bool xywh) {
  check_scale_boxes(boxes, letterboxes);
  const at::Tensor l = as_contiguous(letterboxes, detection_type(boxes.scalar_type()));
  at::Tensor output = at::empty(boxes.sizes(), boxes.options(), at::MemoryFormat::Contiguous);
  core::ScaleBoxesParams params = scale_boxes_params(boxes, l, xywh);
  params.output = output.mutable_data_ptr();
  const auto run = [&](auto zero) {
    at::parallel_for(0, params.images * params.count, 2048, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) core::scale_one_box<decltype(zero)>(params, i);
    });
  };
  switch (params.dtype) {
    case core::DType::kFloat16:
      run(c10::Half{});
      break;
    case core::DType::kBFloat16:
      run(c10::BFloat16{});
      break;
    case core::DType::kFloat32:
      run(float{});
      break;
    case core::DType::kFloat64:
      run(double{});
      break;
  }
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  m.impl("scale_boxes", scale_boxes);
}

}  // namespace torch_fastdet
