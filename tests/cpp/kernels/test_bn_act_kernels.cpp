// The kernels of bn_act against bn_act_problem.h.
#include <gtest/gtest.h>

#include "bn_act_problem.h"
#include "emulator.h"

namespace torch_fastdet::core::bn_act_problem {
namespace {

struct Kernels {
  static void seed(uint64_t seed) { emulator::seed(seed); }

  template <typename A>
  static bool run(Case<A>& c) {
    std::vector<A> partials(2 * std::max(c.plan.partials(), c.backward_plan.partials()));
    BnActForwardParams f{};
    f.plan = c.plan;
    f.dtype = c.dtype;
    f.x = c.x.data();
    f.x_strides = c.x.strides(c.plan);
    f.residual = c.with_residual ? c.residual.data() : nullptr;
    f.residual_strides = c.residual.strides(c.plan);
    f.y = c.y.data();
    f.y_strides = c.y.strides(c.plan);
    f.weight = c.given(c.weight);
    f.bias = c.given(c.bias);
    f.running_mean = c.given(c.running_mean);
    f.running_var = c.given(c.running_var);
    f.num_batches_tracked = c.batches.data();
    f.mean = c.mean.data();
    f.invstd = c.invstd.data();
    f.partials = partials.data();
    f.momentum = c.momentum;
    f.eps = c.eps;
    f.activation = c.activation;
    f.slope = c.slope;
    if (launch_bn_act_forward(f, nullptr) != cudaSuccess) return false;
    BnActBackwardParams b{};
    b.plan = c.backward_plan;
    b.dtype = c.dtype;
    b.x = c.x.data();
    b.x_strides = c.x.strides(c.backward_plan);
    b.grad_y = c.grad_y.data();
    b.grad_y_strides = c.grad_y.strides(c.backward_plan);
    b.grad_x = c.grad_x.data();
    b.grad_x_strides = c.grad_x.strides(c.backward_plan);
    b.weight = f.weight;
    b.bias = f.bias;
    b.grad_weight = c.given(c.grad_weight);
    b.grad_bias = c.given(c.grad_bias);
    b.mean = f.mean;
    b.invstd = f.invstd;
    b.partials = partials.data();
    b.activation = c.activation;
    b.slope = c.slope;
    return launch_bn_act_backward(b, nullptr) == cudaSuccess;
  }
};

// One of the five tensors off by one element, or in a pitch that 16 bytes do not divide; the others aligned.
template <typename A>
void check_misaligned(DType dtype, bool channels_last, int which, bool pitch) {
  const int wide = static_cast<int>(16 / dtype_bytes(dtype));
  std::vector<Image> images;
  for (int i = 0; i < 5; ++i) {
    const bool odd = i == which;
    images.emplace_back(dtype, 2, 16, 24, odd && pitch ? 17 : 16, 0, channels_last, odd && !pitch ? 1 : 0);
  }
  Case<A> c(dtype, Activation::kSiLU, true, std::move(images), 1, 7);
  // In NCHW any number of planes of whole accesses is a whole pitch.
  const int narrow = pitch && !channels_last ? wide : 1;
  EXPECT_EQ(c.plan.vector, which <= 2 ? narrow : wide);
  EXPECT_EQ(c.backward_plan.vector, which == 0 || which >= 3 ? narrow : wide);
  Random random(which);
  c.fill(random);
  ASSERT_TRUE(Kernels::run(c));
  c.compare();
}

TEST(BnActKernels, EachTensorMayBeMisaligned) {
  for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
    for (int i = 0; i < 20 && !HasFailure(); ++i) {
      SCOPED_TRACE("dtype " + std::to_string(static_cast<int>(dtype)) + ", case " + std::to_string(i));
      const auto run = dtype == DType::kFloat64 ? check_misaligned<double> : check_misaligned<float>;
      run(dtype, i % 2, i / 4, i / 2 % 2);
    }
  }
}

TEST(BnActKernels, RandomShapesAndLayouts) {
  check_random_shapes<Kernels>(rounds(60));
}

}  // namespace
}  // namespace torch_fastdet::core::bn_act_problem
