// Check the image operators for CPU, CUDA and Meta, and make the core's structs from checked tensors. Only the CPU
// checks the rows of the tables (check_tables.h), because on the GPU that would be a host sync.
#pragma once

#include <string_view>

#include "core/image/image.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline void check_dense_1d(const at::Tensor& tensor, const at::Tensor& like, const char* op, const std::string& name) {
  check_dtype(tensor, at::kByte, op, name);
  TORCH_CHECK(tensor.dim() == 1, op, ": ", name, " has shape ", tensor.sym_sizes(),
              ", but one dimension is expected: packed images");
  TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " is not contiguous; call .contiguous() first");
  check_same_device(like, "storages[0]", tensor, op, name.c_str());
}

inline void check_storages(at::TensorList storages, const char* op) {
  TORCH_CHECK(!storages.empty() && storages.size() <= core::kMaxStorages, op, ": storages has ", storages.size(),
              " tensors, but 1 to ", core::kMaxStorages, " are expected");
  for (size_t i = 0; i < storages.size(); ++i) {
    check_dense_1d(storages[i], storages[0], op, "storages[" + std::to_string(i) + "]");
  }
}

inline void check_table(const at::Tensor& table, int64_t columns, at::ScalarType dtype, const at::Tensor& like,
                        const char* op, const char* name) {
  check_dtype(table, dtype, op, name);
  TORCH_CHECK(table.dim() == 2, op, ": ", name, " has shape ", table.sym_sizes(), ", but (rows, ", columns,
              ") is expected");
  TORCH_SYM_CHECK(table.sym_size(1).sym_eq(columns), op, ": ", name, " has shape ", table.sym_sizes(), ", but (rows, ",
                  columns, ") is expected");
  TORCH_CHECK(table.is_contiguous(), op, ": ", name, " is not contiguous; call .contiguous() first");
  check_same_device(like, "storages[0]", table, op, name);
}

inline core::WarpArithmetic parse_warp(std::string_view warp, const char* op) {
  if (warp == "fixed") return core::WarpArithmetic::kFixed;
  if (warp == "float") return core::WarpArithmetic::kFloat;
  TORCH_CHECK_VALUE(false, op, ": warp is '", warp, "', but 'fixed' (OpenCV 4) or 'float' (OpenCV 5) is expected");
}

inline void check_channels(int64_t channels, const char* op) {
  TORCH_CHECK_VALUE(channels == 1 || channels == 3, op, ": channels is ", channels, ", but 1 or 3 is expected");
}

inline void check_pixel_dtype(at::ScalarType dtype, const char* op, const char* name) {
  TORCH_CHECK(dtype == at::kByte || dtype == at::kHalf || dtype == at::kFloat, op, ": ", name, " is ",
              dtype_name(dtype), ", but uint8, float16 or float32 is expected");
}

inline void check_batch_out(const at::Tensor& out, const c10::SymInt& batch, const at::Tensor& like, const char* op) {
  TORCH_CHECK(out.dim() == 4, op, ": out has shape ", out.sym_sizes(), ", but (B, C, H, W) is expected");
  check_pixel_dtype(out.scalar_type(), op, "out's dtype");
  TORCH_CHECK(out.sym_size(1) == 1 || out.sym_size(1) == 3, op, ": out has ", out.sym_size(1),
              " channels, but 1 or 3 are expected");
  TORCH_SYM_CHECK(out.sym_size(0).sym_eq(batch), op, ": out holds ", out.sym_size(0), " images, but the plan has ",
                  batch);
  TORCH_CHECK(out.is_contiguous() || out.is_contiguous(at::MemoryFormat::ChannelsLast), op,
              ": out is neither contiguous nor channels_last");
  check_same_device(like, "storages[0]", out, op, "out");
}

struct AugmentTensors {
  at::TensorList storages;
  const at::Tensor &placements, &layers, &matrices, &images;
  const std::optional<at::Tensor>&blend, &tables, &masks;
  using Types =
      std::tuple<at::TensorList, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                 const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&>;
};

struct AugmentOptions {
  std::string_view warp;
  int64_t hsv_lanes;  // see torch_fastdet/ops/image.py
  using Types = std::tuple<std::string_view, int64_t>;
};

struct BatchOptions {
  c10::SymIntArrayRef size;
  int64_t channels;
  std::optional<at::ScalarType> dtype;
  bool channels_last;
  using Types = std::tuple<c10::SymIntArrayRef, int64_t, std::optional<at::ScalarType>, bool>;
};

inline void check_augment(const AugmentTensors& t, const AugmentOptions& options, const char* op) {
  TORCH_CHECK_VALUE(options.hsv_lanes >= 0 && options.hsv_lanes <= core::kMaxCanvas, op, ": hsv_lanes is ",
                    options.hsv_lanes, ", but a number of pixels is expected");
  parse_warp(options.warp, op);
  check_storages(t.storages, op);
  const at::Tensor& like = t.storages[0];
  check_table(t.placements, core::kPlacementColumns, at::kLong, like, op, "placements");
  check_table(t.layers, core::kLayerColumns, at::kLong, like, op, "layers");
  check_table(t.matrices, 9, at::kDouble, like, op, "matrices");
  TORCH_SYM_CHECK(t.matrices.sym_size(0).sym_eq(t.layers.sym_size(0)), op, ": matrices has ", t.matrices.sym_size(0),
                  " rows, but layers has ", t.layers.sym_size(0));
  check_table(t.images, core::kImageColumns, at::kLong, like, op, "images");
  if (t.blend) {
    TORCH_CHECK(t.blend->scalar_type() == at::kDouble && t.blend->dim() == 1 && t.blend->is_contiguous(), op,
                ": blend is ", dtype_name(t.blend->scalar_type()), " of shape ", t.blend->sym_sizes(),
                ", but a contiguous float64 tensor (B,) is expected");
    TORCH_SYM_CHECK(t.blend->sym_size(0).sym_eq(t.images.sym_size(0)), op, ": blend has ", t.blend->sym_size(0),
                    " elements, but images has ", t.images.sym_size(0), " rows");
    check_same_device(like, "storages[0]", *t.blend, op, "blend");
  }
  if (t.tables) {
    TORCH_CHECK(t.tables->scalar_type() == at::kByte && t.tables->dim() == 3 && t.tables->is_contiguous() &&
                    t.tables->sym_size(1) == 3 && t.tables->sym_size(2) == 256,
                op, ": tables is ", dtype_name(t.tables->scalar_type()), " of shape ", t.tables->sym_sizes(),
                ", but a contiguous uint8 tensor (rows, 3, 256) is expected");
    check_same_device(like, "storages[0]", *t.tables, op, "tables");
  }
  if (t.masks) check_dense_1d(*t.masks, like, op, "masks");
}

inline void check_size(c10::SymIntArrayRef size, const char* op) {
  TORCH_CHECK_VALUE(size.size() == 2, op, ": size has ", size.size(), " elements, but (height, width) is expected");
  for (const c10::SymInt& side : size) {
    TORCH_FASTDET_SYM_CHECK_VALUE(side.sym_ge(0), op, ": size is ", size,
                                  ", but sides that are not negative are expected");
    TORCH_FASTDET_SYM_CHECK_VALUE(side.sym_le(core::kMaxCanvas), op, ": size is ", size, ", but sides of at most ",
                                  core::kMaxCanvas, " are expected");
  }
}

inline void check_letterbox(at::TensorList storages, const at::Tensor& plan, const char* op) {
  check_storages(storages, op);
  check_table(plan, core::kLetterboxColumns, at::kLong, storages[0], op, "plan");
}

inline void check_resize(const at::Tensor& out, at::TensorList storages, const at::Tensor& plan, int64_t channels,
                         const char* op) {
  check_storages(storages, op);
  check_channels(channels, op);
  check_dense_1d(out, storages[0], op, "out");
  check_table(plan, core::kResizeColumns, at::kLong, storages[0], op, "plan");
}

inline at::Tensor empty_batch(const at::Tensor& like, const c10::SymInt& batch, const BatchOptions& options,
                              const char* op) {
  check_channels(options.channels, op);
  check_size(options.size, op);
  const at::ScalarType type = options.dtype.value_or(at::kByte);
  check_pixel_dtype(type, op, "dtype");
  return at::empty_symint({batch, c10::SymInt(options.channels), options.size[0], options.size[1]},
                          like.options().dtype(type), memory_format(options.channels_last));
}

inline core::Storages core_storages(at::TensorList storages) {
  core::Storages s{};
  s.count = static_cast<int>(storages.size());
  for (int i = 0; i < s.count; ++i) {
    s.data[i] = storages[i].const_data_ptr<uint8_t>();
    s.size[i] = storages[i].numel();
  }
  return s;
}

inline core::BatchOut core_batch(const at::Tensor& out) {
  const at::ScalarType type = out.scalar_type();
  core::BatchOut batch{};
  batch.data = out.mutable_data_ptr();
  batch.type = type == at::kByte   ? core::PixelType::kUint8
               : type == at::kHalf ? core::PixelType::kFloat16
                                   : core::PixelType::kFloat32;
  batch.channels_last = !out.is_contiguous();
  batch.reciprocal = out.is_cuda();
  batch.batch = out.size(0);
  batch.channels = static_cast<int>(out.size(1));
  batch.height = static_cast<int>(out.size(2));
  batch.width = static_cast<int>(out.size(3));
  return batch;
}

}  // namespace torch_fastdet
