// The image operators but for their loops: check, allocate, fill in the parameters, and hand them to
// Backend::run(params, op), which the CPU and CUDA glue each define.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "ops/image/checks.h"

namespace torch_fastdet {

template <class Backend>
void augment_into(const at::Tensor& out, const AugmentTensors& t, std::string_view warp, int64_t hsv_lanes,
                  const char* op) {
  TORCH_CHECK(hsv_lanes >= 0 && hsv_lanes <= core::kMaxCanvas, op, ": hsv_lanes is ", hsv_lanes,
              ", but a number of pixels is wanted");
  core::AugmentParams params{};
  params.arithmetic = parse_warp(warp, op);
  check_augment(t, op);
  check_batch_out(out, t.pictures.sym_size(0), t.storages[0], op);
  const c10::DeviceGuard guard(out.device());
  params.storages = core_storages(t.storages);
  params.placements = t.placements.const_data_ptr<int64_t>();
  params.layers = t.layers.const_data_ptr<int64_t>();
  params.matrices = t.matrices.const_data_ptr<double>();
  params.pictures = t.pictures.const_data_ptr<int64_t>();
  params.blend = t.blend ? t.blend->const_data_ptr<double>() : nullptr;
  params.tables = t.tables ? t.tables->const_data_ptr<uint8_t>() : nullptr;
  params.masks = t.masks ? t.masks->const_data_ptr<uint8_t>() : nullptr;
  params.placement_rows = t.placements.size(0);
  params.layer_rows = t.layers.size(0);
  params.table_rows = t.tables ? t.tables->size(0) : 0;
  params.mask_bytes = t.masks ? t.masks->numel() : 0;
  params.hsv_lanes = static_cast<int>(hsv_lanes);
  params.out = core_batch(out);
  Backend::run(params, op);
}

template <class Backend>
void image_augment_(at::Tensor& out, at::TensorList storages, const at::Tensor& placements, const at::Tensor& layers,
                    const at::Tensor& matrices, const at::Tensor& pictures, const std::optional<at::Tensor>& blend,
                    const std::optional<at::Tensor>& tables, const std::optional<at::Tensor>& masks,
                    std::string_view warp, int64_t hsv_lanes) {
  augment_into<Backend>(out, {storages, placements, layers, matrices, pictures, blend, tables, masks}, warp, hsv_lanes,
                        "image_augment_");
}

template <class Backend>
at::Tensor image_augment(at::TensorList storages, const at::Tensor& placements, const at::Tensor& layers,
                         const at::Tensor& matrices, const at::Tensor& pictures, const std::optional<at::Tensor>& blend,
                         const std::optional<at::Tensor>& tables, const std::optional<at::Tensor>& masks,
                         c10::SymIntArrayRef size, int64_t channels, std::optional<at::ScalarType> dtype,
                         bool channels_last, std::string_view warp, int64_t hsv_lanes) {
  constexpr const char* kOp = "image_augment";
  const AugmentTensors tensors{storages, placements, layers, matrices, pictures, blend, tables, masks};
  check_augment(tensors, kOp);
  const at::Tensor out = empty_batch(storages[0], pictures.sym_size(0), channels, size, dtype, channels_last, kOp);
  augment_into<Backend>(out, tensors, warp, hsv_lanes, kOp);
  return out;
}

template <class Backend>
void letterbox_into(const at::Tensor& out, at::TensorList storages, const at::Tensor& plan, bool bgr, const char* op) {
  check_letterbox(storages, plan, op);
  check_batch_out(out, plan.sym_size(0), storages[0], op);
  const c10::DeviceGuard guard(out.device());
  Backend::run(core::LetterboxParams{core_storages(storages), plan.const_data_ptr<int64_t>(), bgr, core_batch(out)},
               op);
}

template <class Backend>
void image_letterbox_(at::Tensor& out, at::TensorList storages, const at::Tensor& plan, bool bgr) {
  letterbox_into<Backend>(out, storages, plan, bgr, "image_letterbox_");
}

template <class Backend>
at::Tensor image_letterbox(at::TensorList storages, const at::Tensor& plan, c10::SymIntArrayRef size, int64_t channels,
                           std::optional<at::ScalarType> dtype, bool channels_last, bool bgr) {
  constexpr const char* kOp = "image_letterbox";
  check_letterbox(storages, plan, kOp);
  const at::Tensor out = empty_batch(storages[0], plan.sym_size(0), channels, size, dtype, channels_last, kOp);
  letterbox_into<Backend>(out, storages, plan, bgr, kOp);
  return out;
}

template <class Backend>
void image_resize_(at::Tensor& out, at::TensorList storages, const at::Tensor& plan, int64_t channels) {
  constexpr const char* kOp = "image_resize_";
  check_resize(out, storages, plan, channels, kOp);
  const c10::DeviceGuard guard(out.device());
  Backend::run(core::ResizeParams{core_storages(storages), plan.const_data_ptr<int64_t>(), plan.size(0),
                                  static_cast<int>(channels), out.mutable_data_ptr<uint8_t>(), out.numel()},
               kOp);
}

}  // namespace torch_fastdet
