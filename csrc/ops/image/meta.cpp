// The image operators on Meta: shapes, dtypes and memory formats, of sizes that may be symbolic.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/image/checks.h"

namespace torch_fastdet {
namespace {

at::Tensor image_augment_meta(at::TensorList storages, const at::Tensor& placements, const at::Tensor& layers,
                              const at::Tensor& matrices, const at::Tensor& pictures,
                              const std::optional<at::Tensor>& blend, const std::optional<at::Tensor>& tables,
                              const std::optional<at::Tensor>& masks, c10::SymIntArrayRef size, int64_t channels,
                              std::optional<at::ScalarType> dtype, bool channels_last, std::string_view warp, int64_t) {
  parse_warp(warp, "image_augment");
  check_augment({storages, placements, layers, matrices, pictures, blend, tables, masks}, "image_augment");
  return empty_batch(storages[0], pictures.sym_size(0), channels, size, dtype, channels_last, "image_augment");
}

void image_augment_into_meta(at::Tensor& out, at::TensorList storages, const at::Tensor& placements,
                             const at::Tensor& layers, const at::Tensor& matrices, const at::Tensor& pictures,
                             const std::optional<at::Tensor>& blend, const std::optional<at::Tensor>& tables,
                             const std::optional<at::Tensor>& masks, std::string_view warp, int64_t) {
  parse_warp(warp, "image_augment_");
  check_augment({storages, placements, layers, matrices, pictures, blend, tables, masks}, "image_augment_");
  check_batch_out(out, pictures.sym_size(0), storages[0], "image_augment_");
}

at::Tensor image_letterbox_meta(at::TensorList storages, const at::Tensor& plan, c10::SymIntArrayRef size,
                                int64_t channels, std::optional<at::ScalarType> dtype, bool channels_last, bool) {
  check_letterbox(storages, plan, "image_letterbox");
  return empty_batch(storages[0], plan.sym_size(0), channels, size, dtype, channels_last, "image_letterbox");
}

void image_letterbox_into_meta(at::Tensor& out, at::TensorList storages, const at::Tensor& plan, bool) {
  check_letterbox(storages, plan, "image_letterbox_");
  check_batch_out(out, plan.sym_size(0), storages[0], "image_letterbox_");
}

void image_resize_meta(at::Tensor& out, at::TensorList storages, const at::Tensor& plan, int64_t channels) {
  check_resize(out, storages, plan, channels, "image_resize_");
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Meta, m) {
  m.impl("image_augment", TORCH_FN(image_augment_meta));
  m.impl("image_augment_", TORCH_FN(image_augment_into_meta));
  m.impl("image_letterbox", TORCH_FN(image_letterbox_meta));
  m.impl("image_letterbox_", TORCH_FN(image_letterbox_into_meta));
  m.impl("image_resize_", TORCH_FN(image_resize_meta));
}

}  // namespace torch_fastdet
