// YOLOv5 decode on the CPU: checks, allocates, threads over anchors.
#include "ops/nms/checks.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "core/nms/candidates.h"
#include "core/nms/decode.h"
#include "ops/nms/dispatch_source.h"

namespace torch_fastdet {
namespace {

template <typename T>
void decode(const core::DecodeParams& params) {
  using Layout = core::AnchorHeadLayout<T>;
  const CandidateSource& source = params.source;
  const int64_t sigmoids = 1 + source.classes, width = 4 + sigmoids + source.extra;
  at::parallel_for(0, source.images * source.anchors, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto anchor = Layout::anchor(source, i / source.anchors, i % source.anchors);
      T* row = static_cast<T*>(params.output) + i * width;
      const auto box = Layout::box(source, anchor);
      row[0] = static_cast<T>(box.x);
      row[1] = static_cast<T>(box.y);
      row[2] = static_cast<T>(box.width);
      row[3] = static_cast<T>(box.height);
      for (int64_t c = 0; c < sigmoids; ++c)
        row[4 + c] = static_cast<T>(core::sigmoid(Layout::channel(source, anchor, 4 + c)));
      for (int64_t e = 0; e < source.extra; ++e)
        row[4 + sigmoids + e] = static_cast<T>(Layout::extra(source, anchor, e));
    }
  });
}

at::Tensor yolov5_decode(at::TensorList heads, const at::Tensor& anchors, at::ArrayRef<double> strides, int64_t nm) {
  NmsRequest request = check_yolov5_heads(heads, anchors, strides, nm, "yolov5_decode");
  fill_heads(request, heads);
  fill_anchors(request, false);
  const CandidateSource& source = request.source;
  at::Tensor output = at::empty({source.images, source.anchors, 5 + source.classes + nm}, heads[0].options(),
                                at::MemoryFormat::Contiguous);
  const core::DecodeParams params{source, output.mutable_data_ptr()};
  dispatch_stored<core::AnchorHeadLayout>(source.dtype,
                                          [&](auto layout) { decode<typename decltype(layout)::Stored>(params); });
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  m.impl("yolov5_decode", yolov5_decode);
}

}  // namespace torch_fastdet
