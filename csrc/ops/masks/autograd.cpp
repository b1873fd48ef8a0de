// Instance masks have no gradient. A crop is linear: the gradient is cropped as the masks were.
#include <ATen/core/Tensor.h>

#include "ops/common/autograd.h"

namespace torch_fastdet::masks_autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor call_crop(const at::Tensor& masks, const at::Tensor& boxes) {
  static const auto op = find_operator<at::Tensor(const at::Tensor&, const at::Tensor&)>("crop_mask");
  return op.call(masks, boxes);
}

struct CropMask : torch::autograd::Function<CropMask> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& masks, const at::Tensor& boxes, bool in_place) {
    static const auto op = find_operator<void(const at::Tensor&, const at::Tensor&)>("crop_mask_");
    ctx->save_for_backward({boxes.detach()});
    const at::AutoDispatchBelowADInplaceOrView below;
    if (!in_place) return call_crop(masks, boxes);
    op.call(masks, boxes);
    ctx->mark_dirty({masks});
    return masks;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {call_crop(grads[0], ctx->get_saved_variables()[0]), at::Tensor(), at::Tensor()};
  }
};

at::Tensor crop_mask(const at::Tensor& masks, const at::Tensor& boxes) {
  check_strided(masks, "crop_mask", "masks");
  check_strided(boxes, "crop_mask", "boxes");
  return CropMask::apply(masks, boxes, false);
}

void crop_mask_(const at::Tensor& masks, const at::Tensor& boxes) {
  check_strided(masks, "crop_mask_", "masks");
  check_strided(boxes, "crop_mask_", "boxes");
  CropMask::apply(masks, boxes, true);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  without_gradient(m, {"instance_masks"});
  m.impl("crop_mask", crop_mask);
  m.impl("crop_mask_", crop_mask_);
}

}  // namespace torch_fastdet::masks_autograd
