// Run instance_masks and crop_mask except the loops: check, allocate, set the parameters, and pass them to
// Backend::run(params, op), which cpu.cpp and cuda.cpp each define. Meta runs nothing.
#pragma once

#include "core/masks/crop.h"
#include "ops/common/backend.h"
#include "ops/masks/checks.h"

namespace torch_fastdet {

inline at::Tensor empty_masks(const at::Tensor& coefficients, const MaskOptions& options) {
  c10::SymDimVector shape(coefficients.sym_sizes().begin(), coefficients.sym_sizes().end() - 1);
  shape.push_back(options.size[0]);
  shape.push_back(options.packed ? (options.size[1] + 7) / 8 : options.size[1]);
  return at::empty_symint(shape, coefficients.options().dtype(mask_dtype(options)));
}

// The tensors must outlive the result.
inline core::MasksParams masks_params(const at::Tensor& protos, const at::Tensor& coefficients, const at::Tensor& boxes,
                                      const at::Tensor& out, const MaskOptions& options) {
  const bool batched = protos.dim() == 4;
  core::MasksParams p;
  p.protos = protos.const_data_ptr();
  p.proto_type = core_dtype(protos.scalar_type());
  for (int i = 1; i < 4; ++i) p.proto_stride[i] = protos.stride(i - 4);
  p.proto_stride[0] = batched ? protos.stride(0) : 0;
  p.coefficients = coefficients.const_data_ptr<float>();
  p.boxes = boxes.const_data_ptr<float>();
  p.coefficient_stride[0] = batched ? coefficients.stride(0) : 0;
  p.coefficient_stride[1] = coefficients.stride(-2);
  p.box_stride[0] = batched ? boxes.stride(0) : 0;
  p.box_stride[1] = boxes.stride(-2);
  p.images = batched ? protos.size(0) : 1;
  p.count = coefficients.size(-2);
  p.channels = protos.size(-3);
  p.rows = mask_axis(protos, options, 0);
  p.columns = mask_axis(protos, options, 1);
  p.scale_x = static_cast<float>(options.box_scale[0]), p.scale_y = static_cast<float>(options.box_scale[1]);
  p.sigmoid = options.sigmoid, p.crop_first = options.crop_first;
  p.format = options.packed                    ? core::MaskFormat::kBits
             : out.scalar_type() == at::kFloat ? core::MaskFormat::kFloats
                                               : core::MaskFormat::kBytes;
  p.out = out.mutable_data_ptr();
  return p;
}

template <class Backend>
at::Tensor instance_masks(const at::Tensor& protos, const at::Tensor& coefficients, const at::Tensor& boxes,
                          const MaskOptions& options) {
  check_mask_tensors(protos, coefficients, boxes);
  check_mask_options(options);
  const c10::DeviceGuard guard(protos.device());
  at::Tensor out = empty_masks(coefficients, options);
  if constexpr (!Backend::kMeta) {
    const at::Tensor values = Backend::prototypes(protos);
    const at::Tensor factors = dense_float_rows(coefficients), corners = dense_float_rows(boxes);
    const core::MasksParams params = masks_params(values, factors, corners, out, options);
    if (out.numel() > 0) Backend::run(params, kInstanceMasks);
  }
  return out;
}

// Crop `masks` into `out`. Both are dense and may be the same tensor.
template <class Backend>
void crop_into(const at::Tensor& masks, const at::Tensor& boxes, const at::Tensor& out, const char* op) {
  const at::Tensor corners = dense_float_rows(boxes);
  core::CropParams p;
  p.masks = masks.const_data_ptr(), p.out = out.mutable_data_ptr();
  if (masks.is_floating_point()) {
    p.dtype = core_dtype(masks.scalar_type());
  } else {
    p.integer_bytes = static_cast<int>(masks.element_size());
  }
  p.boxes = corners.const_data_ptr<float>(), p.box_stride = corners.stride(0);
  p.count = masks.size(0);
  p.height = static_cast<int32_t>(masks.size(1)), p.width = static_cast<int32_t>(masks.size(2));
  if (out.numel() > 0) Backend::run(p, op);
}

template <class Backend>
at::Tensor crop_mask(const at::Tensor& masks, const at::Tensor& boxes) {
  check_crop(masks, boxes, "crop_mask");
  const c10::DeviceGuard guard(masks.device());
  at::Tensor out = at::empty_like(masks, at::MemoryFormat::Contiguous);
  if constexpr (!Backend::kMeta) crop_into<Backend>(masks.contiguous(), boxes, out, "crop_mask");
  return out;
}

template <class Backend>
void crop_mask_(const at::Tensor& masks, const at::Tensor& boxes) {
  check_crop(masks, boxes, "crop_mask_");
  const c10::DeviceGuard guard(masks.device());
  if (!masks.is_inference()) masks.unsafeGetTensorImpl()->bump_version();
  if constexpr (!Backend::kMeta) {
    const at::Tensor dense = masks.contiguous();
    crop_into<Backend>(dense, boxes, dense, "crop_mask_");
    if (!dense.is_same(masks)) masks.copy_(dense);
  }
}

template <class Backend>
void register_masks(torch::Library& m) {
  m.impl("crop_mask", TORCH_FN(crop_mask<Backend>));
  m.impl("crop_mask_", TORCH_FN(crop_mask_<Backend>));
  m.impl("instance_masks", unpack<&instance_masks<Backend>>);
}

}  // namespace torch_fastdet
