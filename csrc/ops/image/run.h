// Run the image operators except the loops over pixels: check, guard the device, allocate, set the parameters, and pass
// them to Backend::run(params, op), which cpu.cpp and cuda.cpp each define. Meta runs nothing.
#pragma once

#include "ops/common/backend.h"
#include "ops/image/checks.h"

namespace torch_fastdet {

template <class Backend>
void augment_into(const at::Tensor& out, const AugmentTensors& t, const AugmentOptions& options, const char* op) {
  if constexpr (!Backend::kMeta) {
    const c10::DeviceGuard guard(out.device());
    core::AugmentParams params{};
    params.arithmetic = parse_warp(options.warp, op);
    params.storages = core_storages(t.storages);
    params.placements = t.placements.const_data_ptr<int64_t>();
    params.layers = t.layers.const_data_ptr<int64_t>();
    params.matrices = t.matrices.const_data_ptr<double>();
    params.images = t.images.const_data_ptr<int64_t>();
    params.blend = t.blend ? t.blend->const_data_ptr<double>() : nullptr;
    params.tables = t.tables ? t.tables->const_data_ptr<uint8_t>() : nullptr;
    params.masks = t.masks ? t.masks->const_data_ptr<uint8_t>() : nullptr;
    params.placement_rows = t.placements.size(0);
    params.layer_rows = t.layers.size(0);
    params.table_rows = t.tables ? t.tables->size(0) : 0;
    params.mask_bytes = t.masks ? t.masks->numel() : 0;
    params.hsv_lanes = static_cast<int>(options.hsv_lanes);
    params.out = core_batch(out);
    Backend::run(params, op);
  }
}

template <class Backend>
void image_augment_(at::Tensor& out, const AugmentTensors& tensors, const AugmentOptions& options) {
  constexpr const char* kOp = "image_augment_";
  check_augment(tensors, options, kOp);
  check_batch_out(out, tensors.images.sym_size(0), tensors.storages[0], kOp);
  augment_into<Backend>(out, tensors, options, kOp);
}

template <class Backend>
at::Tensor image_augment(const AugmentTensors& tensors, const BatchOptions& batch, const AugmentOptions& options) {
  constexpr const char* kOp = "image_augment";
  check_augment(tensors, options, kOp);
  const c10::DeviceGuard guard(tensors.storages[0].device());
  const at::Tensor out = empty_batch(tensors.storages[0], tensors.images.sym_size(0), batch, kOp);
  augment_into<Backend>(out, tensors, options, kOp);
  return out;
}

template <class Backend>
void letterbox_into(const at::Tensor& out, at::TensorList storages, const at::Tensor& plan, bool bgr, const char* op) {
  if constexpr (!Backend::kMeta) {
    const c10::DeviceGuard guard(out.device());
    Backend::run(core::LetterboxParams{core_storages(storages), plan.const_data_ptr<int64_t>(), bgr, core_batch(out)},
                 op);
  }
}

template <class Backend>
void image_letterbox_(at::Tensor& out, at::TensorList storages, const at::Tensor& plan, bool bgr) {
  constexpr const char* kOp = "image_letterbox_";
  check_letterbox(storages, plan, kOp);
  check_batch_out(out, plan.sym_size(0), storages[0], kOp);
  letterbox_into<Backend>(out, storages, plan, bgr, kOp);
}

template <class Backend>
at::Tensor image_letterbox(at::TensorList storages, const at::Tensor& plan, const BatchOptions& batch, bool bgr) {
  constexpr const char* kOp = "image_letterbox";
  check_letterbox(storages, plan, kOp);
  const c10::DeviceGuard guard(storages[0].device());
  const at::Tensor out = empty_batch(storages[0], plan.sym_size(0), batch, kOp);
  letterbox_into<Backend>(out, storages, plan, bgr, kOp);
  return out;
}

template <class Backend>
void image_resize_(at::Tensor& out, at::TensorList storages, const at::Tensor& plan, int64_t channels) {
  constexpr const char* kOp = "image_resize_";
  check_resize(out, storages, plan, channels, kOp);
  if constexpr (!Backend::kMeta) {
    const c10::DeviceGuard guard(out.device());
    Backend::run(core::ResizeParams{core_storages(storages), plan.const_data_ptr<int64_t>(), plan.size(0),
                                    static_cast<int>(channels), out.mutable_data_ptr<uint8_t>(), out.numel()},
                 kOp);
  }
}

template <class Backend>
void register_image(torch::Library& m) {
  m.impl("image_augment", unpack<&image_augment<Backend>>);
  m.impl("image_augment_", unpack<&image_augment_<Backend>>);
  m.impl("image_letterbox", unpack<&image_letterbox<Backend>>);
  m.impl("image_letterbox_", TORCH_FN(image_letterbox_<Backend>));
  m.impl("image_resize_", TORCH_FN(image_resize_<Backend>));
}

}  // namespace torch_fastdet
