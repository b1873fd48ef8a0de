// Run bn_act on CUDA: plan the grid for the current device and launch on the current stream.
#include "core/bn_act/bn_act.h"
#include "ops/bn_act/run.h"
#include "ops/common/launch.h"

namespace torch_fastdet::bn_act_cuda {
namespace {

// `images` are all tensors of x's shape that the kernels access; `accesses`, if not 0, suffice for each thread.
core::BnActPlan plan_of(bool channels_last, const at::Tensor& x, const std::vector<core::BnActImage>& images,
                        const char* op, int accesses = 0) {
  TORCH_CHECK(x.size(2) * x.size(3) <= INT32_MAX && x.size(0) <= INT32_MAX, op, ": x has shape ", x.sizes(),
              ", but at most 2147483647 images and pixels an image are expected");
  int64_t blocks = 0;
  check_launch(core::bn_act_blocks(blocks), op);
  const int64_t pixels = x.size(2) * x.size(3);
  const int vector = core::bn_act_vector(channels_last, x.size(1), pixels, static_cast<int>(x.element_size()), images);
  if (accesses) blocks = std::max(blocks, x.numel() / (int64_t{vector} * core::kBnActThreads * accesses));
  return core::make_bn_act_plan(channels_last, x.size(0), x.size(1), pixels, vector, blocks);
}

core::BnActStrides strides_of(const core::BnActPlan& plan, const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const ImageStrides strides = image_strides(tensor);
  if (plan.channels_last) return {strides.image, strides.pixel, 1};
  return {strides.image, plan.vector, strides.channel};
}

// Add the parts' images and the corresponding slices of x.
template <typename Part>
void add_parts(std::vector<core::BnActImage>& images, const at::Tensor& x, const std::vector<Part>& parts,
               at::Tensor Part::*image) {
  int64_t first = 0;
  for (const Part& part : parts) {
    const at::Tensor& own = part.*image;
    images.push_back(image_of(own));
    images.push_back(image_of(x.narrow(1, first, own.size(1))));
    first += own.size(1);
  }
}

// Set the parameters that all kernels share: the plan, x and the activation.
template <typename Params, typename Arguments>
void fill(Params& p, const Arguments& a, const core::BnActPlan& plan) {
  p.plan = plan;
  p.dtype = core_dtype(a.x.scalar_type());
  p.x = a.x.const_data_ptr();
  p.x_strides = strides_of(p.plan, a.x);
  p.activation = a.activation;
  p.slope = a.slope;
}

at::Tensor partials_of(const core::BnActPlan& plan, const at::Tensor& x) {
  return at::empty({plan.partials(), 2}, x.options().dtype(arithmetic_type(x)));
}

struct Cuda : OnDevice {
  static void forward(const BnActForward& a, const char* op) {
    core::BnActForwardParams p{};
    std::vector<core::BnActImage> images{image_of(a.residual)};
    add_parts(images, a.x, a.parts, &BnActForward::Part::y);
    fill(p, a, plan_of(a.channels_last, a.x, images, op));
    if (a.residual.defined()) p.residual = a.residual.const_data_ptr();
    p.residual_strides = strides_of(p.plan, a.residual);
    int64_t first = 0;
    for (const BnActForward::Part& part : a.parts) {
      const at::Tensor& batches = part.num_batches_tracked;
      p.parts[p.part_count++] = {first,
                                 part.y.mutable_data_ptr(),
                                 strides_of(p.plan, part.y),
                                 vector_of(part.weight),
                                 vector_of(part.bias),
                                 vector_of(part.running_mean),
                                 vector_of(part.running_var),
                                 batches.defined() ? batches.mutable_data_ptr<int64_t>() : nullptr};
      first += part.y.size(1);
    }
    p.mean = a.mean.mutable_data_ptr();
    p.invstd = a.invstd.mutable_data_ptr();
    const at::Tensor partials = partials_of(p.plan, a.x);
    p.partials = partials.mutable_data_ptr();
    p.momentum = a.momentum;
    p.eps = a.eps;
    check_launch(core::launch_bn_act_forward(p, current_stream()), op);
  }

  static void eval(const BnActEval& a, const char* op) {
    core::BnActEvalParams p{};
    std::vector<core::BnActImage> images{image_of(a.x), image_of(a.residual), image_of(a.y)};
    if (a.last.defined()) {
      images.push_back(image_of(a.last));
      images.push_back(image_of(a.x.narrow(1, a.last_first(), a.last.size(1))));
    }
    fill(p, a, plan_of(a.channels_last, a.x, images, op, core::kBnActEvalAccesses));
    if (a.residual.defined()) p.residual = a.residual.const_data_ptr();
    p.residual_strides = strides_of(p.plan, a.residual);
    p.y = a.y.mutable_data_ptr();
    p.y_strides = strides_of(p.plan, a.y);
    if (a.last.defined()) p.last = a.last.mutable_data_ptr();
    p.last_strides = strides_of(p.plan, a.last);
    p.last_first = a.last_first();
    p.weight = vector_of(a.weight);
    p.bias = vector_of(a.bias);
    p.mean = vector_of(a.mean);
    p.variance = vector_of(a.variance);
    p.eps = a.eps;
    check_launch(core::launch_bn_act_eval(p, current_stream()), op);
  }

  static void backward(const BnActBackward& a, const char* op) {
    core::BnActBackwardParams p{};
    std::vector<core::BnActImage> images{image_of(a.grad_x)};
    add_parts(images, a.x, a.parts, &BnActBackward::Part::grad_y);
    fill(p, a, plan_of(a.channels_last, a.x, images, op));
    int64_t first = 0;
    for (const BnActBackward::Part& part : a.parts) {
      p.parts[p.part_count++] = {first,
                                 part.grad_y.const_data_ptr(),
                                 strides_of(p.plan, part.grad_y),
                                 vector_of(part.weight),
                                 vector_of(part.bias),
                                 vector_of(part.grad_weight),
                                 vector_of(part.grad_bias)};
      first += part.grad_y.size(1);
    }
    p.grad_x = a.grad_x.mutable_data_ptr();
    p.grad_x_strides = strides_of(p.plan, a.grad_x);
    p.mean = a.mean.const_data_ptr();
    p.invstd = a.invstd.const_data_ptr();
    const at::Tensor partials = partials_of(p.plan, a.x);
    p.partials = partials.mutable_data_ptr();
    check_launch(core::launch_bn_act_backward(p, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_bn_act<Cuda>(m);
}

}  // namespace torch_fastdet::bn_act_cuda
