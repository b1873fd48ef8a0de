// Instance masks have no gradient. A crop is linear, so its gradient is cropped as the masks were.
#include "ops/common/autograd.h"
#include "ops/masks/run.h"

namespace torch_fastdet::masks_autograd {
namespace {

struct CropMask : torch::autograd::Function<CropMask> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& masks, const at::Tensor& boxes, bool in_place) {
    ctx->save_for_backward({boxes.detach()});
    if (!in_place) return call_below_autograd<&torch_fastdet::crop_mask<Meta>>("crop_mask", masks, boxes);
    call_below_autograd<&torch_fastdet::crop_mask_<Meta>>("crop_mask_", masks, boxes);
    ctx->mark_dirty({masks});
    return masks;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor boxes = ctx->get_saved_variables()[0];
    return {call_operator<&torch_fastdet::crop_mask<Meta>>("crop_mask", grads[0], boxes), at::Tensor(), at::Tensor()};
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
