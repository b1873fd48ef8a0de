// Compare the kernels of bn_act with bn_act_problem.h.
#include <gtest/gtest.h>

#include "bn_act_problem.h"
#include "emulator.h"

namespace torch_fastdet::core::bn_act_problem {
namespace {

struct Kernels {
  static void seed(uint64_t seed) { emulator::seed(seed); }

  // Return the vector from one of its channels on.
  static BnActVector from(const BnActVector& vector, int64_t channel) {
    return {static_cast<char*>(vector.data) + channel * dtype_bytes(vector.dtype), vector.dtype};
  }

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
    // The channels are those of one norm or, with the same result, of two.
    const int64_t middle = c.channels() / 2 / c.plan.vector * c.plan.vector;
    const bool two = !c.with_residual && middle > 0 && middle % c.backward_plan.vector == 0;
    int64_t other_batches = 0;
    for (const int64_t first : {int64_t{0}, middle}) {
      if (f.part_count && !two) break;
      f.parts[f.part_count++] = {first,
                                 c.y.buffer.at(c.y.index(0, first, 0)),
                                 c.y.strides(c.plan),
                                 from(c.given(c.weight), first),
                                 from(c.given(c.bias), first),
                                 from(c.given(c.running_mean), first),
                                 from(c.given(c.running_var), first),
                                 first ? &other_batches : c.batches.data()};
    }
    f.mean = c.mean.data();
    f.invstd = c.invstd.data();
    f.partials = partials.data();
    f.momentum = c.momentum;
    f.eps = c.eps;
    f.activation = c.activation;
    f.slope = c.slope;
    if (launch_bn_act_forward(f, nullptr) != cudaSuccess || other_batches != two) return false;
    BnActBackwardParams b{};
    b.plan = c.backward_plan;
    b.dtype = c.dtype;
    b.x = c.x.data();
    b.x_strides = c.x.strides(c.backward_plan);
    for (const BnActForwardPart& part : {f.parts[0], f.parts[1]}) {
      if (b.part_count == f.part_count) break;
      b.parts[b.part_count++] = {part.first,
                                 c.grad_y.buffer.at(c.grad_y.index(0, part.first, 0)),
                                 c.grad_y.strides(c.backward_plan),
                                 part.weight,
                                 part.bias,
                                 from(c.given(c.grad_weight), part.first),
                                 from(c.given(c.grad_bias), part.first)};
    }
    b.grad_x = c.grad_x.data();
    b.grad_x_strides = c.grad_x.strides(c.backward_plan);
    b.mean = f.mean;
    b.invstd = f.invstd;
    b.partials = partials.data();
    b.activation = c.activation;
    b.slope = c.slope;
    return launch_bn_act_backward(b, nullptr) == cudaSuccess;
  }

  template <typename A>
  static bool eval(Case<A>& c, int64_t first, const BnActPlan& plan) {
    BnActEvalParams p{};
    p.plan = plan;
    p.dtype = c.dtype;
    p.x = c.x.data();
    p.x_strides = c.x.strides(plan);
    p.residual = c.with_residual ? c.residual.data() : nullptr;
    p.residual_strides = c.residual.strides(plan);
    p.y = c.y.data();
    p.y_strides = c.y.strides(plan);
    p.last = c.grad_x.data();
    p.last_strides = c.grad_x.strides(plan);
    p.last_first = first;
    p.weight = c.given(c.weight);
    p.bias = c.given(c.bias);
    p.mean = c.given(c.running_mean);
    p.variance = c.given(c.running_var);
    p.eps = c.eps;
    p.activation = c.activation;
    p.slope = c.slope;
    return launch_bn_act_eval(p, nullptr) == cudaSuccess;
  }
};

// One of the five tensors is off by one element, or has a pitch that 16 bytes do not divide; the others are aligned.
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
