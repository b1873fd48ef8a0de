// bn_act on CUDA: plans the grid for the current device and launches on the current stream.
#include "core/bn_act/bn_act.h"
#include "ops/bn_act/run.h"
#include "ops/common/launch.h"

namespace torch_fastdet::bn_act_cuda {
namespace {

// `images` are all tensors of x's shape that the kernels read and write.
core::BnActPlan plan_of(bool channels_last, const at::Tensor& x, std::initializer_list<core::BnActImage> images,
                        const char* op) {
  TORCH_CHECK(x.size(2) * x.size(3) <= INT32_MAX && x.size(0) <= INT32_MAX, op, ": x has shape ", x.sizes(),
              ", but at most 2147483647 images and pixels an image are expected");
  int64_t blocks = 0;
  check_launch(core::bn_act_blocks(blocks), op);
  const int64_t pixels = x.size(2) * x.size(3);
  const int vector = core::bn_act_vector(channels_last, x.size(1), pixels, static_cast<int>(x.element_size()), images);
  return core::make_bn_act_plan(channels_last, x.size(0), x.size(1), pixels, vector, blocks);
}

core::BnActStrides strides_of(const core::BnActPlan& plan, const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const ImageStrides strides = image_strides(tensor);
  if (plan.channels_last) return {strides.image, strides.pixel, plan.slice_channels};
  return {strides.image, plan.vector, strides.channel};
}

at::Tensor partials_of(const core::BnActPlan& plan, const at::Tensor& x) {
  return at::empty({plan.partials(), 2}, x.options().dtype(statistic_dtype(x)));
}

struct Cuda : OnDevice {
  static void forward(const BnActForward& a, const char* op) {
    core::BnActForwardParams p{};
    p.plan = plan_of(a.channels_last, a.x, {image_of(a.x), image_of(a.residual), image_of(a.y)}, op);
    p.dtype = core_dtype(a.x.scalar_type());
    p.x = a.x.const_data_ptr();
    p.x_strides = strides_of(p.plan, a.x);
    if (a.residual.defined()) p.residual = a.residual.const_data_ptr();
    p.residual_strides = strides_of(p.plan, a.residual);
    p.y = a.y.mutable_data_ptr();
    p.y_strides = strides_of(p.plan, a.y);
    p.weight = vector_of(a.weight);
    p.bias = vector_of(a.bias);
    p.running_mean = vector_of(a.running_mean);
    p.running_var = vector_of(a.running_var);
    if (a.num_batches_tracked.defined()) p.num_batches_tracked = a.num_batches_tracked.mutable_data_ptr<int64_t>();
    p.mean = a.mean.mutable_data_ptr();
    p.invstd = a.invstd.mutable_data_ptr();
    const at::Tensor partials = partials_of(p.plan, a.x);
    p.partials = partials.mutable_data_ptr();
    p.momentum = a.momentum;
    p.eps = a.eps;
    p.activation = a.activation;
    p.slope = a.slope;
    check_launch(core::launch_bn_act_forward(p, current_stream()), op);
  }

  static void backward(const BnActBackward& a, const char* op) {
    core::BnActBackwardParams p{};
    p.plan = plan_of(a.channels_last, a.x, {image_of(a.x), image_of(a.grad_y), image_of(a.grad_x)}, op);
    p.dtype = core_dtype(a.x.scalar_type());
    p.x = a.x.const_data_ptr();
    p.x_strides = strides_of(p.plan, a.x);
    p.grad_y = a.grad_y.const_data_ptr();
    p.grad_y_strides = strides_of(p.plan, a.grad_y);
    p.grad_x = a.grad_x.mutable_data_ptr();
    p.grad_x_strides = strides_of(p.plan, a.grad_x);
    p.weight = vector_of(a.weight);
    p.bias = vector_of(a.bias);
    p.grad_weight = vector_of(a.grad_weight);
    p.grad_bias = vector_of(a.grad_bias);
    p.mean = a.mean.const_data_ptr();
    p.invstd = a.invstd.const_data_ptr();
    const at::Tensor partials = partials_of(p.plan, a.x);
    p.partials = partials.mutable_data_ptr();
    p.activation = a.activation;
    p.slope = a.slope;
    check_launch(core::launch_bn_act_backward(p, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_bn_act<Cuda>(m);
}

}  // namespace torch_fastdet::bn_act_cuda
