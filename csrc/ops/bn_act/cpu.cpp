// Run bn_act on the CPU: the core's loops on Torch's threads.
#include "core/bn_act/bn_act_loops.h"
#include "ops/bn_act/run.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"

namespace torch_fastdet::bn_act_cpu {
namespace {

namespace loops = core::bn_act_loops;

loops::Sizes sizes_of(const at::Tensor& x, bool channels_last) {
  return {x.size(0), x.size(1), x.size(2) * x.size(3), channels_last};
}

struct Cpu : OnDevice {
  static void forward(const BnActForward& a, const char*) {
    int64_t first = 0;
    for (const BnActForward::Part& part : a.parts) {
      const int64_t channels = part.y.size(1);
      const at::Tensor x = a.x.narrow(1, first, channels);
      loops::forward<TorchHalves>(
          {sizes_of(x, a.channels_last), core_dtype(x.scalar_type()), image_of(x), image_of(a.residual),
           image_of(part.y), vector_of(part.weight), vector_of(part.bias), vector_of(part.running_mean),
           vector_of(part.running_var),
           part.num_batches_tracked.defined() ? part.num_batches_tracked.mutable_data_ptr<int64_t>() : nullptr,
           vector_of(a.mean.narrow(0, first, channels)), vector_of(a.invstd.narrow(0, first, channels)), a.momentum,
           a.eps, a.activation, a.slope},
          parallel_for);
      first += channels;
    }
  }
  static void eval(const BnActEval& a, const char*) {
    loops::eval<TorchHalves>(
        {sizes_of(a.x, a.channels_last), core_dtype(a.x.scalar_type()), image_of(a.x), image_of(a.residual),
         image_of(a.y), image_of(a.last), a.last_first(), vector_of(a.weight), vector_of(a.bias), vector_of(a.mean),
         vector_of(a.variance), a.eps, a.activation, a.slope},
        parallel_for);
  }
  static void backward(const BnActBackward& a, const char*) {
    int64_t first = 0;
    for (const BnActBackward::Part& part : a.parts) {
      const int64_t channels = part.grad_y.size(1);
      const at::Tensor x = a.x.narrow(1, first, channels), grad_x = a.grad_x.narrow(1, first, channels);
      loops::backward<TorchHalves>(
          {sizes_of(x, a.channels_last), core_dtype(x.scalar_type()), image_of(x), image_of(part.grad_y),
           image_of(grad_x), vector_of(part.weight), vector_of(part.bias), vector_of(a.mean.narrow(0, first, channels)),
           vector_of(a.invstd.narrow(0, first, channels)), vector_of(part.grad_weight), vector_of(part.grad_bias),
           a.activation, a.slope},
          parallel_for);
      first += channels;
    }
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_bn_act<Cpu>(m);
}

}  // namespace torch_fastdet::bn_act_cpu
