// Nested loops compute bn_act in double. The kernels and CPU loops are compared with them: both layouts, every type,
// slices of larger tensors, any number of blocks.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "core/bn_act/bn_act.h"
#include "dtypes.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::bn_act_problem {

// An image holds (N, C, H * W) at `first` of a tensor of `all` channels, and its strides for a plan.
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
    return channels_last ? BnActStrides{pixels * all, all, 1} : BnActStrides{pixels * all, plan.vector, pixels};
  }
  BnActImage walk() const {
    return channels_last ? BnActImage{data(), pixels * all, 1, all} : BnActImage{data(), pixels * all, pixels, 1};
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
  BnActPlan plan, backward_plan;
  std::vector<double> old_mean, old_var;
  const double momentum = 0.25, eps = 1e-3, slope = 0.1;

  // `vectors` is the number of elements by which vectors of C elements are off the start of their storage.
  Case(DType dtype, Activation activation, bool with_residual, std::vector<Image> images, int64_t vectors,
       int64_t blocks)
      : dtype(dtype),
        activation(activation),
        with_residual(with_residual),
        x(std::move(images[0])),
        residual(std::move(images[1])),
        y(std::move(images[2])),
        grad_y(std::move(images[3])),
        grad_x(std::move(images[4])),
        weight(vector(vectors)),
        bias(vector(vectors)),
        running_mean(vector(vectors)),
        running_var(vector(vectors)),
        mean(vector(vectors)),
        invstd(vector(vectors)),
        grad_weight(vector(vectors)),
        grad_bias(vector(vectors)),
        batches{0} {
    BnActImage added = residual.walk();
    if (!with_residual) added.data = nullptr;
    plan = planned({x.walk(), added, y.walk()}, blocks);
    backward_plan = planned({x.walk(), grad_y.walk(), grad_x.walk()}, blocks);
  }
  static BnActVector given(const Tensor& tensor) { return {tensor.data(), tensor.dtype}; }
  Tensor vector(int64_t offset) const {
    return Tensor(sizeof(A) == 8 ? DType::kFloat64 : DType::kFloat32, {x.channels}, offset);
  }
  BnActPlan planned(const std::vector<BnActImage>& images, int64_t blocks) const {
    const int width =
        bn_act_vector(x.channels_last, x.channels, x.pixels, static_cast<int>(dtype_bytes(dtype)), images);
    return make_bn_act_plan(x.channels_last, x.batch, x.channels, x.pixels, width, blocks);
  }
  void fill(Random& random) {
    x.fill(random, 2, random.chance(50) ? 0.5 : 30);
    residual.fill(random, 1, 0);
    grad_y.fill(random, 1, 0);
    for (int64_t i = 0; i < channels(); ++i) {
      weight.set(i, 1 + 0.3 * random.normal());
      bias.set(i, random.normal());
      running_mean.set(i, random.normal());
      running_var.set(i, 1 + 0.1 * random.normal());
      old_mean.push_back(running_mean.get(i));
      old_var.push_back(running_var.get(i));
    }
  }
  int64_t channels() const { return x.channels; }
  double count() const { return static_cast<double>(x.batch * x.pixels); }
  // The tolerance covers float32 sums and the stored type.
  double tolerance(double scale) const {
    const double unit = dtype == DType::kFloat16    ? 1e-3
                        : dtype == DType::kBFloat16 ? 8e-3
                        : sizeof(A) == 4            ? 3e-6
                                                    : 1e-12;
    return unit * scale + (sizeof(A) == 4 ? 2e-5 : 1e-12);
  }

  // In evaluation the kernel writes y and, in grad_x, the channels from `first` on once more.
  BnActPlan eval_plan(int64_t first, int64_t blocks) const {
    BnActImage added = residual.walk(), from = x.walk();
    if (!with_residual) added.data = nullptr;
    from.data = x.buffer.at(x.index(0, first, 0));
    return planned({x.walk(), from, added, y.walk(), grad_x.walk()}, blocks);
  }
  void compare_eval(int64_t first) const {
    for (int64_t c = 0; c < channels() && !testing::Test::HasFailure(); ++c) {
      SCOPED_TRACE("channel " + std::to_string(c));
      each([&](int64_t n, int64_t p) {
        const double inverse = 1 / std::sqrt(running_var.get(c) + eps);
        const double z = (x.get(n, c, p) - running_mean.get(c)) * inverse * weight.get(c) + bias.get(c);
        double want = with_residual ? residual.get(n, c, p) : 0;
        dispatch_activation(activation, [&](auto act) { want += activate<decltype(act)::value, false>(z, slope); });
        const double within = tolerance(std::abs(want)) * 2 + tolerance(0) * std::abs(x.get(n, c, p));
        EXPECT_NEAR(y.get(n, c, p), want, within);
        if (c >= first) {
          EXPECT_EQ(grad_x.get(n, c - first, p), y.get(n, c, p));
        }
      });
    }
    EXPECT_TRUE(y.all != y.channels || y.buffer.surroundings_intact());
    EXPECT_TRUE(grad_x.buffer.surroundings_intact());
  }

  void compare() const {
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

// Backend::run(problem) runs the problem forward and backward, and returns whether that worked.
template <class Backend, typename A>
void check(DType dtype, Random& random) {
  const bool channels_last = random.chance(60);
  const int64_t batch = 1 + random.below(3), pixels = random.one_of({2, 7, 16, 33, 64, 120});
  const int64_t channels = random.one_of({1, 3, 8, 16, 24, 40, 80, 96, 136});
  const auto image = [&](bool slice) {
    const int64_t wide = random.chance(80) ? 8 : 3;
    const int64_t first = slice ? random.below(2) * wide : 0, all = channels + (slice ? wide : 0);
    return Image(dtype, batch, channels, pixels, all, first, channels_last, random.chance(85) ? 0 : random.below(8));
  };
  std::vector<Image> images;
  for (int i = 0; i < 5; ++i) images.push_back(image(i < 4 && random.chance(40)));
  const Activation activation = random.one_of(
      {Activation::kIdentity, Activation::kSiLU, Activation::kReLU, Activation::kLeakyReLU, Activation::kHardswish});
  const bool with_residual = random.chance(40);
  const int64_t offset = random.chance(50) ? 0 : random.below(4);
  Case<A> c(dtype, activation, with_residual, std::move(images), offset, 1 + random.below(40));
  c.fill(random);
  ASSERT_TRUE(Backend::run(c));
  c.compare();
  const int64_t first = random.chance(50) ? 0 : channels / 2 / 8 * 8;
  ASSERT_TRUE(Backend::eval(c, first, c.eval_plan(first, 1 + random.below(40))));
  c.compare_eval(first);
}

template <class Backend>
void check_random_shapes(uint64_t seeds) {
  for (uint64_t seed = 0; seed < seeds && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    Backend::seed(seed);
    const DType dtype = random.one_of(kEveryDtype);
    dtype == DType::kFloat64 ? check<Backend, double>(dtype, random) : check<Backend, float>(dtype, random);
  }
}

}  // namespace torch_fastdet::core::bn_act_problem
