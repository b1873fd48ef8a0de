// Checks, allocates, and shares the lines of the upsample plans out among the CPU's threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "core/upsample/upsample_avx2.h"
#include "core/upsample/upsample_loops.h"
#include "ops/upsample/checks.h"

namespace torch_fastdet {
namespace {

// Lines a thread should take at least, for about 32 K elements moved.
int64_t grain(int64_t lines, int64_t elements) {
  return std::max<int64_t>(1, lines * 32768 / std::max<int64_t>(1, elements));
}

// Calls f with an unsigned integer of the element's size: forward moves values and never computes with them.
template <typename F>
void dispatch_itemsize(int64_t itemsize, F&& f) {
  itemsize == 2 ? f(uint16_t{}) : itemsize == 4 ? f(uint32_t{}) : f(uint64_t{});
}

void forward(const at::Tensor& x, const at::Tensor& out, bool channels_last) {
  const core::UpsamplePlan plan = upsample_plan(x, out, channels_last);
  const int64_t lines = core::upsample_lines(plan);
  dispatch_itemsize(x.element_size(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(x.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    at::parallel_for(0, lines, grain(lines, 4 * plan.small_numel()),
                     [&](int64_t begin, int64_t end) { core::upsample_forward_lines(plan, from, to, begin, end); });
  });
}

at::Tensor upsample_nearest2x(const at::Tensor& x) {
  check_upsample(x);
  at::Tensor out = empty_upsample(x);
  const bool channels_last = walks_channels_last(x, out, x.suggest_memory_format());
  forward(with_dense_rows(x, channels_last), out, channels_last);
  return out;
}

at::Tensor upsample_nearest2x_cat(const at::Tensor& x, const at::Tensor& skip) {
  check_upsample_cat(x, skip);
  at::Tensor out = empty_upsample_cat(x, skip);
  const bool channels_last = walks_channels_last(x, out, upsample_cat_format(x, skip));
  forward(with_dense_rows(x.to(out.scalar_type()), channels_last), out, channels_last);
  const at::Tensor dense_skip = with_dense_rows(skip.to(out.scalar_type()), channels_last);
  const core::CopyPlan plan = copy_plan(dense_skip, out, channels_last);
  const int64_t lines = core::copy_lines(plan);
  dispatch_itemsize(out.element_size(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(dense_skip.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr()) + x.size(1) * out.stride(1);
    at::parallel_for(0, lines, grain(lines, plan.numel()),
                     [&](int64_t begin, int64_t end) { core::copy_lines_of(plan, from, to, begin, end); });
  });
  return out;
}

template <typename Sums, typename T>
void backward(const at::Tensor& grad_output, const at::Tensor& grad_x, const core::UpsamplePlan& plan) {
  const T* from = grad_output.const_data_ptr<T>();
  T* to = grad_x.mutable_data_ptr<T>();
  const int64_t lines = core::upsample_lines(plan);
  at::parallel_for(0, lines, grain(lines, 4 * plan.small_numel()), [&](int64_t begin, int64_t end) {
    core::upsample_backward_lines<Sums>(plan, from, to, begin, end);
  });
}

template <typename T, typename Lanes>
void backward_half(const at::Tensor& grad_output, const at::Tensor& grad_x, const core::UpsamplePlan& plan) {
  if (core::has_avx2()) {
    backward<core::SumSquaresAvx2<T, Lanes>, T>(grad_output, grad_x, plan);
  } else {
    backward<core::SumSquares<T, float>, T>(grad_output, grad_x, plan);
  }
}

at::Tensor upsample_nearest2x_backward(const at::Tensor& grad_output) {
  check_upsample_backward(grad_output);
  at::Tensor grad_x = empty_upsample_backward(grad_output);
  const bool channels_last = walks_channels_last(grad_output, grad_x, grad_output.suggest_memory_format());
  const at::Tensor dense = with_dense_rows(grad_output, channels_last);
  const core::UpsamplePlan plan = upsample_plan(grad_x, dense, channels_last);
  switch (core_dtype(grad_x.scalar_type())) {
    case core::DType::kFloat16:
      backward_half<at::Half, core::Float16Lanes>(dense, grad_x, plan);
      break;
    case core::DType::kBFloat16:
      backward_half<at::BFloat16, core::BFloat16Lanes>(dense, grad_x, plan);
      break;
    case core::DType::kFloat32:
      backward<core::SumSquares<float, float>, float>(dense, grad_x, plan);
      break;
    case core::DType::kFloat64:
      backward<core::SumSquares<double, double>, double>(dense, grad_x, plan);
      break;
  }
  return grad_x;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  m.impl("upsample_nearest2x", upsample_nearest2x);
  m.impl("upsample_nearest2x_backward", upsample_nearest2x_backward);
  m.impl("upsample_nearest2x_cat", upsample_nearest2x_cat);
}

}  // namespace torch_fastdet
