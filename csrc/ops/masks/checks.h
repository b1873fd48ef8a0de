// Check the arguments of instance_masks and crop_mask, and turn the options into the axes of core::MasksParams.
#pragma once

#include "core/masks/masks_math.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

struct MaskOptions {
  c10::SymIntArrayRef size;
  at::OptionalSymIntArrayRef window;
  int64_t factor;
  at::ArrayRef<double> box_scale;
  bool sigmoid;
  bool crop_first;
  bool packed;
  std::optional<at::ScalarType> dtype;
  using Types = std::tuple<c10::SymIntArrayRef, at::OptionalSymIntArrayRef, int64_t, at::ArrayRef<double>, bool, bool,
                           bool, std::optional<at::ScalarType>>;
};

inline constexpr const char* kInstanceMasks = "instance_masks";
// Limit the pixels along an axis, as positions are float32.
inline constexpr int64_t kMaxMaskSide = int64_t{1} << 22;

inline void check_mask_tensors(const at::Tensor& protos, const at::Tensor& coefficients, const at::Tensor& boxes) {
  constexpr const char* op = kInstanceMasks;
  check_operand(protos, "protos", protos, op, "protos");
  check_operand(protos, "protos", coefficients, op, "coefficients");
  check_operand(protos, "protos", boxes, op, "boxes");
  TORCH_CHECK(protos.dim() == 3 || protos.dim() == 4, op, ": protos has shape ", protos.sym_sizes(),
              ", but (channels, height, width) or (images, channels, height, width) is expected");
  const bool batched = protos.dim() == 4;
  TORCH_CHECK(coefficients.dim() == protos.dim() - 1, op, ": coefficients has shape ", coefficients.sym_sizes(),
              batched ? ", but (images, n, channels) is expected" : ", but (n, channels) is expected");
  TORCH_CHECK(boxes.dim() == protos.dim() - 1, op, ": boxes has shape ", boxes.sym_sizes(),
              batched ? ", but (images, n, 4) is expected" : ", but (n, 4) is expected");
  TORCH_SYM_CHECK(coefficients.sym_size(-1).sym_eq(protos.sym_size(-3)), op, ": coefficients has shape ",
                  coefficients.sym_sizes(), ", but one for each of protos' ", protos.sym_size(-3),
                  " channels is expected");
  TORCH_SYM_CHECK(boxes.sym_size(-1).sym_eq(4).sym_and(boxes.sym_size(-2).sym_eq(coefficients.sym_size(-2))), op,
                  ": boxes has shape ", boxes.sym_sizes(), ", but four corners for each of ", coefficients.sym_size(-2),
                  " rows of coefficients are expected");
  if (batched) {
    TORCH_SYM_CHECK(same_sizes(coefficients, protos, {0}).sym_and(same_sizes(boxes, protos, {0})), op,
                    ": coefficients and boxes have shapes ", coefficients.sym_sizes(), " and ", boxes.sym_sizes(),
                    ", but protos has ", protos.sym_size(0), " images");
  }
  TORCH_SYM_CHECK(protos.sym_size(-1).sym_ge(1).sym_and(protos.sym_size(-2).sym_ge(1)), op, ": protos has shape ",
                  protos.sym_sizes(), ", but a height and a width of 1 or more are expected");
}

inline void check_crop(const at::Tensor& masks, const at::Tensor& boxes, const char* op) {
  check_strided(masks, op, "masks");
  check_strided(boxes, op, "boxes");
  check_same_device(masks, "masks", boxes, op, "boxes");
  const at::ScalarType type = masks.scalar_type();
  TORCH_CHECK(is_supported_float(type) || type == at::kBool || type == at::kByte || type == at::kChar ||
                  type == at::kShort || type == at::kInt || type == at::kLong,
              op, ": masks has dtype ", dtype_name(type),
              ", but float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64 or bool is expected");
  TORCH_CHECK(masks.dim() == 3, op, ": masks has shape ", masks.sym_sizes(), ", but (n, height, width) is expected");
  TORCH_CHECK(boxes.dim() == 2 && !boxes.is_complex(), op, ": boxes has shape ", boxes.sym_sizes(), " and dtype ",
              dtype_name(boxes.scalar_type()), ", but (n, 4) of real numbers is expected");
  TORCH_SYM_CHECK(boxes.sym_size(1).sym_eq(4).sym_and(boxes.sym_size(0).sym_eq(masks.sym_size(0))), op,
                  ": boxes has shape ", boxes.sym_sizes(), ", but four corners for each of ", masks.sym_size(0),
                  " masks are expected");
  TORCH_SYM_CHECK(masks.sym_size(1).sym_le(kMaxMaskSide).sym_and(masks.sym_size(2).sym_le(kMaxMaskSide)), op,
                  ": masks has shape ", masks.sym_sizes(), ", but sides of at most ", kMaxMaskSide,
                  " pixels are expected");
}

inline at::ScalarType mask_dtype(const MaskOptions& options) {
  const at::ScalarType dtype = options.dtype.value_or(at::kByte);
  TORCH_CHECK(dtype == at::kByte || dtype == at::kBool || dtype == at::kFloat, kInstanceMasks, ": dtype is ",
              dtype_name(dtype), ", but uint8, bool or float32 is expected");
  TORCH_CHECK(!options.packed || dtype == at::kByte, kInstanceMasks, ": dtype is ", dtype_name(dtype),
              ", but packed masks are uint8");
  return dtype;
}

inline void check_mask_options(const MaskOptions& options) {
  mask_dtype(options);
  TORCH_FASTDET_SYM_CHECK_VALUE(options.size[0].sym_ge(1).sym_and(options.size[1].sym_ge(1)), kInstanceMasks,
                                ": size is ", options.size, ", but a height and a width of 1 or more are expected");
  TORCH_CHECK_VALUE(options.factor == 1 || options.factor == 2 || options.factor == 4, kInstanceMasks, ": factor is ",
                    options.factor, ", but 1, 2 or 4 is expected");
}

// `window` is (top, left, bottom, right); axis 0 is the rows' axis.
inline core::MaskAxis mask_axis(const at::Tensor& protos, const MaskOptions& options, int axis) {
  const int64_t in = protos.size(axis - 2), enlarged = in * options.factor;
  const int64_t size = options.size[axis].expect_int();
  const int64_t begin = options.window ? (*options.window)[axis].expect_int() : 0;
  const int64_t end = options.window ? (*options.window)[axis + 2].expect_int() : enlarged;
  TORCH_CHECK(size <= kMaxMaskSide && enlarged <= kMaxMaskSide, kInstanceMasks, ": size is ", options.size,
              " and protos has shape ", protos.sizes(), ", but sides of at most ", kMaxMaskSide,
              " pixels are expected");
  TORCH_CHECK_VALUE(0 <= begin && begin < end && end <= enlarged, kInstanceMasks, ": window is ", *options.window,
                    ", but top, left, bottom and right of at least one pixel within ", protos.size(-2) * options.factor,
                    " x ", protos.size(-1) * options.factor, " are expected");
  core::MaskAxis result;
  result.size = static_cast<int32_t>(size), result.in = static_cast<int32_t>(in);
  result.factor = static_cast<int32_t>(options.factor);
  result.begin = static_cast<int32_t>(begin), result.span = static_cast<int32_t>(end - begin);
  return result;
}

}  // namespace torch_fastdet
