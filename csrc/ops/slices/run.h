// Run sum_slices, pad_and_sum and sum_rows except the loops, Backend::run(params, op) of cpu.cpp and cuda.cpp.
#pragma once

#include <vector>

#include "core/slices/slices.h"
#include "ops/common/backend.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

inline void check_sum_slices(at::TensorList x, const at::Tensor& out) {
  constexpr const char* op = "sum_slices";
  check_images(out, op, "out");
  TORCH_CHECK(!x.empty() && x.size() <= core::kMostSlices, op, ": x has ", x.size(), " entries, but 1 to ",
              core::kMostSlices, " are expected");
  for (const at::Tensor& each : x) {
    check_images(each, op, "x");
    check_same_device(out, "out", each, op, "x");
    TORCH_CHECK(each.scalar_type() == out.scalar_type(), op, ": x has dtype ", dtype_name(each.scalar_type()),
                ", but out has ", dtype_name(out.scalar_type()));
    TORCH_SYM_CHECK(same_sizes(each, out, {0, 1, 2, 3}), op, ": x has shape ", each.sym_sizes(), ", but out has ",
                    out.sym_sizes());
  }
}

// Return the stride of pixels (channels_last) or images, or -1 without such rows. One element may have any stride.
inline int64_t row_pitch(const at::Tensor& tensor, bool channels_last) {
  const auto lies = [&](int64_t dimension, int64_t stride) {
    return tensor.size(dimension) == 1 || tensor.stride(dimension) == stride;
  };
  const int64_t c = tensor.size(1), h = tensor.size(2), w = tensor.size(3);
  if (!channels_last) return lies(3, 1) && lies(2, w) && lies(1, w * h) ? tensor.stride(0) : -1;
  const int64_t pitch = w > 1 ? tensor.stride(3) : h > 1 ? tensor.stride(2) : tensor.size(0) > 1 ? tensor.stride(0) : c;
  return lies(1, 1) && lies(2, pitch * w) && lies(0, pitch * w * h) ? pitch : -1;
}

// Set out = x[0] + x[1] + ..., in this order. An operand whose rows differ from those of out is copied first.
template <class Backend>
void sum_slices(at::TensorList x, const at::Tensor& out) {
  check_sum_slices(x, out);
  if constexpr (!Backend::kMeta) {
    if (out.numel() == 0) return;
    const c10::DeviceGuard guard(out.device());
    const bool channels_last = row_pitch(out, false) < 0;
    core::SumSlicesParams params{};
    params.out = out.mutable_data_ptr();
    params.out_pitch = row_pitch(out, channels_last);
    params.dtype = core_dtype(out.scalar_type());
    TORCH_CHECK(params.out_pitch >= 0, "sum_slices: out has strides ", out.strides(),
                ", but channels of a contiguous or channels_last tensor are expected");
    params.width = channels_last ? out.size(1) : out.size(1) * out.size(2) * out.size(3);
    params.rows = out.numel() / params.width;
    std::vector<at::Tensor> operands;  // kept until the launch
    for (const at::Tensor& each : x) {
      const bool fits = row_pitch(each, channels_last) >= 0;
      operands.push_back(fits ? each : each.contiguous(memory_format(channels_last)));
      params.x[params.count] = operands.back().const_data_ptr();
      params.x_pitch[params.count++] = row_pitch(operands.back(), channels_last);
    }
    Backend::run(params, "sum_slices");
  }
}

// Return x, channels_last and followed by channels of zeros, and the sum of each channel.
template <class Backend>
std::tuple<at::Tensor, at::Tensor> pad_and_sum(const at::Tensor& x, int64_t channels) {
  constexpr const char* op = "pad_and_sum";
  check_images(x, op, "x");
  TORCH_SYM_CHECK(x.sym_size(1).sym_le(channels), op, ": channels is ", channels, ", but at least those of x, ",
                  x.sym_size(1), ", are expected");
  const c10::DeviceGuard guard(x.device());
  const at::Tensor out = at::empty_symint({x.sym_size(0), channels, x.sym_size(2), x.sym_size(3)},
                                          x.options().memory_format(at::MemoryFormat::ChannelsLast));
  const at::Tensor sums = at::empty({channels}, x.options());
  if constexpr (!Backend::kMeta) {
    if (out.numel() == 0) return {out, sums.zero_()};
    const bool has_pixels = x.size(2) == 1 || x.size(3) == 1 || x.stride(2) == x.stride(3) * x.size(3);
    const at::Tensor from = has_pixels ? x : x.contiguous();
    core::PadAndSumParams params{};
    params.batch = x.size(0);
    params.channels = x.size(1);
    params.pixels = x.size(2) * x.size(3);
    params.padded = channels;
    params.image_stride = from.stride(0);
    params.channel_stride = from.stride(1);
    params.pixel_stride = from.stride(x.size(3) == 1 ? 2 : 3);
    params.x = from.const_data_ptr();
    params.out = out.mutable_data_ptr();
    params.sums = sums.mutable_data_ptr();
    params.dtype = core_dtype(x.scalar_type());
    const at::Tensor partials = at::empty({params.splits(), channels}, x.options().dtype(arithmetic_type(x)));
    params.partials = partials.mutable_data_ptr();
    Backend::run(params, op);
  }
  return {out, sums};
}

template <class Backend>
at::Tensor sum_rows(const at::Tensor& x) {
  constexpr const char* op = "sum_rows";
  check_strided(x, op, "x");
  check_float(x, op, "x");
  TORCH_CHECK(x.dim() > 0, op, ": x has shape [], but (..., width) is expected");
  const c10::DeviceGuard guard(x.device());
  const at::Tensor sums = at::empty_symint({x.sym_size(-1)}, x.options());
  if constexpr (!Backend::kMeta) {
    if (x.numel() == 0) return sums.zero_();
    const at::Tensor from = x.contiguous();
    core::SumRowsParams params{};
    params.width = x.size(-1);
    params.rows = x.numel() / params.width;
    params.x = from.const_data_ptr();
    params.sums = sums.mutable_data_ptr();
    params.dtype = core_dtype(x.scalar_type());
    const at::Tensor partials = at::empty({params.splits(), params.width}, x.options().dtype(arithmetic_type(x)));
    params.partials = partials.mutable_data_ptr();
    Backend::run(params, op);
  }
  return sums;
}

template <class Backend>
void register_slices(torch::Library& m) {
  m.impl("sum_slices", TORCH_FN(sum_slices<Backend>));
  m.impl("pad_and_sum", TORCH_FN(pad_and_sum<Backend>));
  m.impl("sum_rows", TORCH_FN(sum_rows<Backend>));
}

}  // namespace torch_fastdet
