// bn_act on the CPU: the core's loops on Torch's threads.
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
    loops::forward<TorchHalves>(
        {sizes_of(a.x, a.channels_last), core_dtype(a.x.scalar_type()), image_of(a.x), image_of(a.residual),
         image_of(a.y), vector_of(a.weight), vector_of(a.bias), vector_of(a.running_mean), vector_of(a.running_var),
         a.num_batches_tracked.defined() ? a.num_batches_tracked.mutable_data_ptr<int64_t>() : nullptr,
         vector_of(a.mean), vector_of(a.invstd), a.momentum, a.eps, a.activation, a.slope},
        parallel_for);
  }
  static void backward(const BnActBackward& a, const char*) {
    loops::backward<TorchHalves>(
        {sizes_of(a.x, a.channels_last), core_dtype(a.x.scalar_type()), image_of(a.x), image_of(a.grad_y),
         image_of(a.grad_x), vector_of(a.weight), vector_of(a.bias), vector_of(a.mean), vector_of(a.invstd),
         vector_of(a.grad_weight), vector_of(a.grad_bias), a.activation, a.slope},
        parallel_for);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_bn_act<Cpu>(m);
}

}  // namespace torch_fastdet::bn_act_cpu
