// Which operators run in another type under autocast. Operators that are not named here take their inputs as they come:
// the upsampling ones because stock's do, yolov5_loss because it computes in float32 whatever the heads' type and a
// cast would only copy them, and suppression and decoding because they are not trained.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace torch_fastdet {
namespace {

// float16 and bfloat16 become float32; float64 stays, and what is no float is left to the operator's checks.
at::Tensor at_least_float32(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
}

// Stock's CIoU and DIoU square and sum: pow and sum are on PyTorch's float32 list, so that boxes of half precision give
// a float32 result.
template <c10::DispatchKey kAutocast>
at::Tensor bbox_iou_float32(const at::Tensor& box1, const at::Tensor& box2, bool xywh, bool giou, bool diou, bool ciou,
                            double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_fastdet::bbox_iou", "")
                             .typed<decltype(bbox_iou_float32<kAutocast>)>();
  const c10::impl::ExcludeDispatchKeyGuard below(kAutocast);
  return op.call(at_least_float32(box1), at_least_float32(box2), xywh, giou, diou, ciou, eps);
}

template <c10::DispatchKey kAutocast>
at::Tensor iou_loss_float32(const at::Tensor& box1, const at::Tensor& box2, std::string_view kind, bool xywh,
                            std::string_view reduction, double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_fastdet::iou_loss", "")
                             .typed<decltype(iou_loss_float32<kAutocast>)>();
  const c10::impl::ExcludeDispatchKeyGuard below(kAutocast);
  return op.call(at_least_float32(box1), at_least_float32(box2), kind, xywh, reduction, eps);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, AutocastCUDA, m) {
  m.impl("bbox_iou", TORCH_FN(bbox_iou_float32<c10::DispatchKey::AutocastCUDA>));
  m.impl("iou_loss", TORCH_FN(iou_loss_float32<c10::DispatchKey::AutocastCUDA>));
}

TORCH_LIBRARY_IMPL(torch_fastdet, AutocastCPU, m) {
  m.impl("bbox_iou", TORCH_FN(bbox_iou_float32<c10::DispatchKey::AutocastCPU>));
  m.impl("iou_loss", TORCH_FN(iou_loss_float32<c10::DispatchKey::AutocastCPU>));
}

}  // namespace torch_fastdet
