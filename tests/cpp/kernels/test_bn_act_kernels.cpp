// bn_act.cu against nested loops in double: both layouts, every type, slices of larger tensors, any number of blocks.
#include <gtest/gtest.h>

#include <vector>

#include "core/bn_act/bn_act.h"
#include "emulator.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core {
namespace {

// (N, C, H * W) at `first` of a tensor of `all` channels, and its strides for a plan.
struct Image {
  int64_t batch, channels, pixels, all, first;
  bool channels_last;
  Tensor buffer;

  Image(DType dtype, int64_t batch, int64_t channels, int64_t pixels, int64_t all, int64_t first, bool channels_last,
        int64_t offset)
      : batch(batch),
        channels(channels),
        pixels(pixels),
        all(all),
        first(first),
        channels_last(channels_last),
        buffer(
            dtype, {batch, all, pixels},
            channels_last ? std::vector<int64_t>{pixels * all, 1, all} : std::vector<int64_t>{all * pixels, pixels, 1},
            offset) {}
  int64_t index(int64_t n, int64_t c, int64_t p) const { return (n * all + first + c) * pixels + p; }
  double get(int64_t n, int64_t c, int64_t p) const { return buffer.get(index(n, c, p)); }
  void* data() const { return buffer.at(index(0, 0, 0)); }
  void fill(Random& random, double scale, double shift) {
    for (int64_t i = 0; i < buffer.numel(); ++i) buffer.set(i, random.normal() * scale + shift);
  }
  BnActStrides strides(const BnActPlan& plan) const {
    return channels_last ? BnActStrides{pixels * all, all, plan.slice_channels}
                         : BnActStrides{pixels * all, plan.vector, pixels};
  }
  // Whether accesses of `wide` elements are aligned.
  bool allows(int64_t wide) const {
    const auto address = reinterpret_cast<uintptr_t>(data());
    return address % 16 == 0 && (channels_last ? channels % wide == 0 && all % wide == 0 : pixels % wide == 0);
  }
};

template <typename A>
struct Case {
  DType dtype;
  Activation activation;
  bool with_residual;
  Image x, residual, y, grad_y, grad_x;
  Tensor weight, bias, running_mean, running_var, mean, invstd, grad_weight, grad_bias;
  std::vector<int64_t> batches;
  BnActPlan plan;
  const double momentum = 0.25, eps = 1e-3, slope = 0.1;
  int64_t channels() const { return x.channels; }
  double count() const { return static_cast<double>(x.batch * x.pixels); }
  // Of float32 sums and of the stored type.
  double tolerance(double scale) const {
    const double unit = dtype == DType::kFloat16    ? 1e-3
                        : dtype == DType::kBFloat16 ? 8e-3
                        : sizeof(A) == 4            ? 3e-6
                                                    : 1e-12;
    return unit * scale + (sizeof(A) == 4 ? 2e-5 : 1e-12);
  }

  void run() {
    const auto vector = [](Tensor& tensor) { return BnActVector{tensor.data(), tensor.dtype}; };
    std::vector<A> partials(2 * plan.partials());
    BnActForwardParams f{};
    f.plan = plan;
    f.dtype = dtype;
    f.x = x.data();
    f.x_strides = x.strides(plan);
    f.residual = with_residual ? residual.data() : nullptr;
    f.residual_strides = residual.strides(plan);
    f.y = y.data();
    f.y_strides = y.strides(plan);
    f.weight = vector(weight);
    f.bias = vector(bias);
    f.running_mean = vector(running_mean);
    f.running_var = vector(running_var);
    f.num_batches_tracked = batches.data();
    f.mean = mean.data();
    f.invstd = invstd.data();
    f.partials = partials.data();
    f.momentum = momentum;
    f.eps = eps;
    f.activation = activation;
    f.slope = slope;
    ASSERT_EQ(launch_bn_act_forward(f, nullptr), cudaSuccess);
    BnActBackwardParams b{};
    b.plan = plan;
    b.dtype = dtype;
    b.x = x.data();
    b.x_strides = f.x_strides;
    b.grad_y = grad_y.data();
    b.grad_y_strides = grad_y.strides(plan);
    b.grad_x = grad_x.data();
    b.grad_x_strides = grad_x.strides(plan);
    b.weight = f.weight;
    b.bias = f.bias;
    b.grad_weight = vector(grad_weight);
    b.grad_bias = vector(grad_bias);
    b.mean = f.mean;
    b.invstd = f.invstd;
    b.partials = partials.data();
    b.activation = activation;
    b.slope = slope;
    ASSERT_EQ(launch_bn_act_backward(b, nullptr), cudaSuccess);
  }

  void compare(const std::vector<double>& old_mean, const std::vector<double>& old_var) const {
    for (int64_t c = 0; c < channels() && !testing::Test::HasFailure(); ++c)
      compare_channel(c, old_mean[c], old_var[c]);
    EXPECT_EQ(batches[0], 1);
    EXPECT_TRUE(y.all != y.channels || y.buffer.surroundings_intact());
    EXPECT_TRUE(grad_x.buffer.surroundings_intact());
  }

  template <typename F>
  void each(F&& f) const {
    for (int64_t n = 0; n < x.batch; ++n) {
      for (int64_t p = 0; p < x.pixels; ++p) f(n, p);
    }
  }

  void compare_channel(int64_t c, double old_mean, double old_var) const {
    SCOPED_TRACE("channel " + std::to_string(c));
    double m = 0, v = 0;
    each([&](int64_t n, int64_t p) { m += x.get(n, c, p) / count(); });
    each([&](int64_t n, int64_t p) { v += (x.get(n, c, p) - m) * (x.get(n, c, p) - m) / count(); });
    const double inverse = 1 / std::sqrt(v + eps), gamma = weight.get(c), beta = bias.get(c);
    EXPECT_NEAR(mean.get(c), m, tolerance(0) * std::max(1., std::abs(m)));
    EXPECT_NEAR(invstd.get(c), inverse, tolerance(0) * 5 * inverse);
    EXPECT_NEAR(running_mean.get(c), momentum * m + (1 - momentum) * old_mean,
                tolerance(0) * std::max(1., std::abs(m)));
    EXPECT_NEAR(running_var.get(c), momentum * v * count() / (count() - 1) + (1 - momentum) * old_var,
                tolerance(0) * 5);
    double sum = 0, product = 0, size = 0;
    const auto normal = [&](int64_t n, int64_t p) { return (x.get(n, c, p) - m) * inverse; };
    const auto at = [&](int64_t n, int64_t p, double& value, double& dz) {
      dispatch_activation(activation, [&](auto act) {
        const double z = normal(n, p) * gamma + beta;
        value = activate<decltype(act)::value, false>(z, slope);
        dz = activate_backward<decltype(act)::value, false>(z, grad_y.get(n, c, p), slope);
      });
    };
    each([&](int64_t n, int64_t p) {
      double value, dz;
      at(n, p, value, dz);
      sum += dz;
      product += dz * normal(n, p);
      size += std::abs(dz) * (1 + std::abs(normal(n, p)));
      const double want = value + (with_residual ? residual.get(n, c, p) : 0);
      EXPECT_NEAR(y.get(n, c, p), want, tolerance(std::abs(want)) * 2);
    });
    EXPECT_NEAR(grad_bias.get(c), sum, tolerance(0) * (1 + size));
    EXPECT_NEAR(grad_weight.get(c), product, tolerance(0) * (1 + size));
    each([&](int64_t n, int64_t p) {
      double value, dz;
      at(n, p, value, dz);
      const double want = (dz - sum / count() - normal(n, p) * product / count()) * gamma * inverse;
      EXPECT_NEAR(grad_x.get(n, c, p), want, tolerance(std::abs(want)) * 2 * (1 + gamma * inverse));
    });
  }
};

template <typename A>
void check(DType dtype, Random& random) {
  const bool channels_last = random.chance(60);
  const int64_t batch = 1 + random.below(3), pixels = random.one_of({2, 7, 16, 33, 64, 120});
  const int64_t channels = random.one_of({1, 3, 8, 16, 24, 40, 80, 96, 136});
  const auto image = [&](bool slice) {
    const int64_t wide = random.chance(80) ? 8 : 3;
    const int64_t first = slice ? random.below(2) * wide : 0, all = channels + (slice ? wide : 0);
    return Image(dtype, batch, channels, pixels, all, first, channels_last, random.chance(85) ? 0 : random.below(8));
  };
  const auto vector = [&](DType type) { return Tensor(type, {channels}); };
  const DType own = sizeof(A) == 8 ? DType::kFloat64 : DType::kFloat32;
  Case<A> c{dtype,
            random.one_of({Activation::kIdentity, Activation::kSiLU, Activation::kReLU, Activation::kLeakyReLU,
                           Activation::kHardswish}),
            random.chance(40),
            image(random.chance(40)),
            image(random.chance(40)),
            image(random.chance(40)),
            image(random.chance(40)),
            image(false),
            vector(own),
            vector(own),
            vector(own),
            vector(own),
            vector(own),
            vector(own),
            vector(own),
            vector(own),
            {0},
            {}};
  bool wide = true;
  const int64_t most = 16 / dtype_bytes(dtype);
  for (const Image* i : {&c.x, &c.residual, &c.y, &c.grad_y, &c.grad_x}) wide = wide && i->allows(most);
  c.plan =
      make_bn_act_plan(channels_last, batch, channels, pixels, wide ? static_cast<int>(most) : 1, 1 + random.below(40));
  c.x.fill(random, 2, random.chance(50) ? 0.5 : 30);
  c.residual.fill(random, 1, 0);
  c.grad_y.fill(random, 1, 0);
  std::vector<double> old_mean, old_var;
  for (int64_t i = 0; i < channels; ++i) {
    c.weight.set(i, 1 + 0.3 * random.normal());
    c.bias.set(i, random.normal());
    c.running_mean.set(i, random.normal());
    c.running_var.set(i, 1 + 0.1 * random.normal());
    old_mean.push_back(c.running_mean.get(i));
    old_var.push_back(c.running_var.get(i));
  }
  c.run();
  c.compare(old_mean, old_var);
}

TEST(BnActKernels, RandomShapesAndLayouts) {
  for (uint64_t seed = 0; seed < rounds(60) && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    emulator::seed(seed);
    const DType dtype = random.one_of({DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64});
    dtype == DType::kFloat64 ? check<double>(dtype, random) : check<float>(dtype, random);
  }
}

TEST(BnActPlan, EveryPositionAndChannelOnce) {
  for (uint64_t seed = 0; seed < rounds(500); ++seed) {
    Random random(seed);
    const bool channels_last = random.chance(50);
    const int vector = static_cast<int>(random.one_of({1, 2, 4, 8}));
    const int64_t channels = (1 + random.below(200)) * (channels_last ? vector : 1);
    const int64_t pixels = (1 + random.below(500)) * (channels_last ? 1 : vector);
    const BnActPlan plan =
        make_bn_act_plan(channels_last, 1 + random.below(9), channels, pixels, vector, 1 + random.below(300));
    ASSERT_LE(plan.slice_vectors, kBnActMostSliceVectors);
    ASSERT_LE(plan.slice_channels, kBnActThreads);
    ASSERT_GE(plan.slices * plan.slice_channels, channels);
    ASSERT_LT((plan.slices - 1) * plan.slice_channels, channels);
    int64_t next = 0;
    for (int split = 0; split < plan.splits; ++split) {
      ASSERT_EQ(plan.split_begin(split), next);
      ASSERT_GT(plan.split_size(split), 0);
      next += plan.split_size(split);
    }
    ASSERT_EQ(next, plan.positions());
    ASSERT_EQ(plan.count(), plan.batch * pixels);
  }
}

}  // namespace
}  // namespace torch_fastdet::core
