// bn_act on the CPU: channels are shared among the threads, so that the order of a channel's sums does not depend on
// their number. Statistics and sums are in double.
#include <ATen/Parallel.h>

#include <array>

#include "core/common/storage.h"
#include "ops/bn_act/run.h"
#include "ops/common/dispatch.h"

namespace torch_fastdet::bn_act_cpu {
namespace {

// Channels of a task: of a cache line in channels_last, where they are adjacent.
constexpr int64_t kMostChannels = 32;
using Sums = std::array<double, kMostChannels>;

template <typename T>
struct Image {
  T* data;
  ImageStrides strides;
  T& at(int64_t n, int64_t pixel, int64_t c) const {
    return data[n * strides.image + pixel * strides.pixel + c * strides.channel];
  }
};

template <typename T>
Image<const T> image_in(const at::Tensor& tensor) {
  if (!tensor.defined()) return {nullptr, {}};
  return {static_cast<const T*>(tensor.const_data_ptr()), image_strides(tensor)};
}

template <typename T>
Image<T> image_out(const at::Tensor& tensor) {
  return {static_cast<T*>(tensor.mutable_data_ptr()), image_strides(tensor)};
}

double load_at(const at::Tensor& vector, int64_t i, double otherwise) {
  if (!vector.defined()) return otherwise;
  return with_dtype(core_dtype(vector.scalar_type()), [&](auto zero) {
    return static_cast<double>(static_cast<const decltype(zero)*>(vector.const_data_ptr())[i]);
  });
}

void store_at(const at::Tensor& vector, int64_t i, double value) {
  if (!vector.defined() || vector.numel() == 0) return;
  with_dtype(core_dtype(vector.scalar_type()), [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(vector.mutable_data_ptr())[i] = static_cast<T>(value);
  });
}

// Calls f(first channel, channels) for groups of channels, on several threads.
template <typename F>
void for_channels(const at::Tensor& x, bool channels_last, F&& f) {
  const int64_t each = channels_last ? kMostChannels : 1, channels = x.size(1);
  at::parallel_for(0, (channels + each - 1) / each, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i * each, std::min(each, channels - i * each));
  });
}

// Calls f(image, pixel) for each position, in order.
template <typename F>
void for_positions(const at::Tensor& x, F&& f) {
  const int64_t images = x.size(0), pixels = x.size(2) * x.size(3);
  for (int64_t n = 0; n < images; ++n) {
    for (int64_t pixel = 0; pixel < pixels; ++pixel) f(n, pixel);
  }
}

void update_statistics(const BnActForward& a, int64_t channel, double mean, double variance, double count) {
  const auto blend = [&](const at::Tensor& running, double value) {
    if (!running.defined()) return;
    store_at(running, channel, a.momentum * value + (1 - a.momentum) * load_at(running, channel, 0));
  };
  blend(a.running_mean, mean);
  blend(a.running_var, variance * (count / (count - 1)));
}

template <typename T, core::Activation kAct>
void forward(const BnActForward& a) {
  using A = typename core::Storage<T>::arithmetic;
  const auto x = image_in<T>(a.x), residual = image_in<T>(a.residual);
  const auto y = image_out<T>(a.y);
  const double count = static_cast<double>(a.x.size(0) * a.x.size(2) * a.x.size(3));
  const A slope = static_cast<A>(a.slope);
  for_channels(a.x, a.channels_last, [&](int64_t first, int64_t channels) {
    Sums mean{}, squares{};
    for_positions(a.x, [&](int64_t n, int64_t pixel) {
      for (int64_t c = 0; c < channels; ++c) mean[c] += static_cast<double>(x.at(n, pixel, first + c));
    });
    for (int64_t c = 0; c < channels; ++c) mean[c] /= count;
    for_positions(a.x, [&](int64_t n, int64_t pixel) {
      for (int64_t c = 0; c < channels; ++c) {
        const double centered = static_cast<double>(x.at(n, pixel, first + c)) - mean[c];
        squares[c] += centered * centered;
      }
    });
    std::array<A, kMostChannels> center, scale, shift;
    for (int64_t c = 0; c < channels; ++c) {
      const double variance = squares[c] / count, invstd = 1 / std::sqrt(variance + a.eps);
      store_at(a.mean, first + c, mean[c]);
      store_at(a.invstd, first + c, invstd);
      update_statistics(a, first + c, mean[c], variance, count);
      center[c] = static_cast<A>(mean[c]);
      scale[c] = static_cast<A>(invstd * load_at(a.weight, first + c, 1));
      shift[c] = static_cast<A>(load_at(a.bias, first + c, 0));
    }
    for_positions(a.x, [&](int64_t n, int64_t pixel) {
      for (int64_t c = 0; c < channels; ++c) {
        const A z = (core::Storage<T>::load(x.at(n, pixel, first + c)) - center[c]) * scale[c] + shift[c];
        A value = core::activate<kAct, false>(z, slope);
        if (residual.data) value += core::Storage<T>::load(residual.at(n, pixel, first + c));
        y.at(n, pixel, first + c) = core::Storage<T>::store(value);
      }
    });
  });
  if (a.num_batches_tracked.defined()) ++*a.num_batches_tracked.mutable_data_ptr<int64_t>();
}

template <typename T, core::Activation kAct>
void backward(const BnActBackward& a) {
  using A = typename core::Storage<T>::arithmetic;
  const auto x = image_in<T>(a.x), grad_y = image_in<T>(a.grad_y);
  const auto grad_x = image_out<T>(a.grad_x);
  const double count = static_cast<double>(a.x.size(0) * a.x.size(2) * a.x.size(3));
  const A slope = static_cast<A>(a.slope);
  for_channels(a.x, a.channels_last, [&](int64_t first, int64_t channels) {
    std::array<A, kMostChannels> center, scale, shift, mean_dz, slope_dz;
    for (int64_t c = 0; c < channels; ++c) {
      center[c] = static_cast<A>(load_at(a.mean, first + c, 0));
      scale[c] = static_cast<A>(load_at(a.invstd, first + c, 0) * load_at(a.weight, first + c, 1));
      shift[c] = static_cast<A>(load_at(a.bias, first + c, 0));
    }
    // The gradient at the activation's input, and how far x is from its mean.
    const auto dz_at = [&](int64_t n, int64_t pixel, int64_t c, A& centered) {
      centered = core::Storage<T>::load(x.at(n, pixel, first + c)) - center[c];
      const A grad = core::Storage<T>::load(grad_y.at(n, pixel, first + c));
      return core::activate_backward<kAct, false>(centered * scale[c] + shift[c], grad, slope);
    };
    Sums sum{}, product{};
    for_positions(a.x, [&](int64_t n, int64_t pixel) {
      for (int64_t c = 0; c < channels; ++c) {
        A centered;
        const A dz = dz_at(n, pixel, c, centered);
        sum[c] += dz;
        product[c] += static_cast<double>(dz) * centered;
      }
    });
    for (int64_t c = 0; c < channels; ++c) {
      const double invstd = load_at(a.invstd, first + c, 0);
      store_at(a.grad_weight, first + c, product[c] * invstd);
      store_at(a.grad_bias, first + c, sum[c]);
      mean_dz[c] = static_cast<A>(sum[c] / count);
      slope_dz[c] = static_cast<A>(product[c] / count * invstd * invstd);
    }
    for_positions(a.x, [&](int64_t n, int64_t pixel) {
      for (int64_t c = 0; c < channels; ++c) {
        A centered;
        const A dz = dz_at(n, pixel, c, centered);
        grad_x.at(n, pixel, first + c) = core::Storage<T>::store((dz - mean_dz[c] - centered * slope_dz[c]) * scale[c]);
      }
    });
  });
}

struct Cpu : OnDevice {
  static void forward(const BnActForward& a, const char*) {
    with_dtype(core_dtype(a.x.scalar_type()), [&](auto zero) {
      core::dispatch_activation(
          a.activation, [&](auto activation) { bn_act_cpu::forward<decltype(zero), decltype(activation)::value>(a); });
    });
  }
  static void backward(const BnActBackward& a, const char*) {
    with_dtype(core_dtype(a.x.scalar_type()), [&](auto zero) {
      core::dispatch_activation(
          a.activation, [&](auto activation) { bn_act_cpu::backward<decltype(zero), decltype(activation)::value>(a); });
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_bn_act<Cpu>(m);
}

}  // namespace torch_fastdet::bn_act_cpu
