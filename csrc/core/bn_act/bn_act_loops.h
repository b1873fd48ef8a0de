// Run bn_act on the CPU. parallel_for(begin, end, grain, f) distributes channels, each summed in one order, in double.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "core/bn_act/bn_act.h"
#include "core/common/cpu_types.h"
#include "core/common/storage.h"

namespace torch_fastdet::core::bn_act_loops {
namespace {  // local to each including file, so that functions called once are inlined

struct Sizes {
  int64_t images, channels, pixels;
  bool channels_last;
};

struct ForwardParams {
  Sizes sizes;
  DType dtype;                                          // dtype of x, residual and y
  BnActImage x, residual;                               // residual: null if there is none
  BnActImage y;                                         // result
  BnActVector weight, bias, running_mean, running_var;  // null: as in BnActForwardParams
  int64_t* num_batches_tracked;
  BnActVector mean, invstd;  // results
  double momentum, eps;
  Activation activation;
  double slope;
};

struct EvalParams {
  Sizes sizes;
  DType dtype;  // dtype of x, residual, y and last
  BnActImage x, residual;
  BnActImage y, last;  // results; last: a second copy of the channels from `last_first` on, may be null
  int64_t last_first;
  BnActVector weight, bias, mean, variance;  // null: 1, 0, 0 and 1 - eps
  double eps;
  Activation activation;
  double slope;
};

struct BackwardParams {
  Sizes sizes;
  DType dtype;  // dtype of x, grad_y and grad_x
  BnActImage x, grad_y;
  BnActImage grad_x;  // result
  BnActVector weight, bias, mean, invstd;
  BnActVector grad_weight, grad_bias;  // results, or null
  Activation activation;
  double slope;
};

// A task has this many channels in channels_last, where they are adjacent: those of a cache line.
constexpr int64_t kMostChannels = 32;
using Sums = std::array<double, kMostChannels>;

template <typename T>
struct Elements {
  T* data;
  BnActImage strides;
  explicit Elements(const BnActImage& image) : data(static_cast<T*>(const_cast<void*>(image.data))), strides(image) {}
  T& at(int64_t n, int64_t pixel, int64_t c) const {
    return data[n * strides.image + pixel * strides.pixel + c * strides.channel];
  }
};

template <class Halves>
double load_at(const BnActVector& vector, int64_t i, double otherwise) {
  if (!vector.data) return otherwise;
  return with_dtype<Halves>(
      vector.dtype, [&](auto zero) { return static_cast<double>(static_cast<const decltype(zero)*>(vector.data)[i]); });
}

template <class Halves>
void store_at(const BnActVector& vector, int64_t i, double value) {
  if (!vector.data) return;
  with_dtype<Halves>(vector.dtype, [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(vector.data)[i] = static_cast<T>(value);
  });
}

// Call f(first channel, number of channels) for groups of channels.
template <typename ParallelFor, typename F>
void for_channels(const Sizes& sizes, const ParallelFor& parallel_for, F&& f) {
  const int64_t each = sizes.channels_last ? kMostChannels : 1;
  parallel_for(0, ceil_div(sizes.channels, each), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i * each, std::min(each, sizes.channels - i * each));
  });
}

// Call f(image, pixel) for each position, in order.
template <typename F>
void for_positions(const Sizes& sizes, F&& f) {
  for (int64_t n = 0; n < sizes.images; ++n) {
    for (int64_t pixel = 0; pixel < sizes.pixels; ++pixel) f(n, pixel);
  }
}

template <class Halves>
void update_statistics(const ForwardParams& p, int64_t channel, double mean, double variance, double count) {
  const auto blend = [&](const BnActVector& running, double value) {
    if (!running.data) return;
    store_at<Halves>(running, channel, p.momentum * value + (1 - p.momentum) * load_at<Halves>(running, channel, 0));
  };
  blend(p.running_mean, mean);
  blend(p.running_var, variance * (count / (count - 1)));
}

// Subtract, multiply by and add these numbers, in this order, to normalize the channels of a task.
template <typename A>
struct Coefficients {
  std::array<A, kMostChannels> center, scale, shift;
};

// Call write(image, pixel, channel, result) for each element of a task, in order.
template <typename T, Activation kAct, typename Params, typename A, typename Write>
void for_results(const Params& p, int64_t first, int64_t channels, const Coefficients<A>& at, Write&& write) {
  const Elements<const T> x(p.x), residual(p.residual);
  const A slope = static_cast<A>(p.slope);
  for_positions(p.sizes, [&](int64_t n, int64_t pixel) {
    for (int64_t c = 0; c < channels; ++c) {
      const A z = (Storage<T>::load(x.at(n, pixel, first + c)) - at.center[c]) * at.scale[c] + at.shift[c];
      A value = activate<kAct, false>(z, slope);
      if (residual.data) value += Storage<T>::load(residual.at(n, pixel, first + c));
      write(n, pixel, first + c, Storage<T>::store(value));
    }
  });
}

template <class Halves, typename T, Activation kAct, typename ParallelFor>
void eval_as(const EvalParams& p, const ParallelFor& parallel_for) {
  using A = typename Storage<T>::arithmetic;
  const Elements<T> y(p.y), last(p.last);
  for_channels(p.sizes, parallel_for, [&](int64_t first, int64_t channels) {
    Coefficients<A> at;
    for (int64_t c = 0; c < channels; ++c) {
      const double invstd = 1 / std::sqrt(load_at<Halves>(p.variance, first + c, 1 - p.eps) + p.eps);
      at.center[c] = static_cast<A>(load_at<Halves>(p.mean, first + c, 0));
      at.scale[c] = static_cast<A>(invstd * load_at<Halves>(p.weight, first + c, 1));
      at.shift[c] = static_cast<A>(load_at<Halves>(p.bias, first + c, 0));
    }
    for_results<T, kAct>(p, first, channels, at, [&](int64_t n, int64_t pixel, int64_t c, T result) {
      y.at(n, pixel, c) = result;
      if (last.data && c >= p.last_first) last.at(n, pixel, c - p.last_first) = result;
    });
  });
}

template <class Halves, typename T, Activation kAct, typename ParallelFor>
void forward_as(const ForwardParams& p, const ParallelFor& parallel_for) {
  using A = typename Storage<T>::arithmetic;
  const Elements<const T> x(p.x);
  const Elements<T> y(p.y);
  const double count = static_cast<double>(p.sizes.images * p.sizes.pixels);
  for_channels(p.sizes, parallel_for, [&](int64_t first, int64_t channels) {
    Sums mean{}, squares{};
    for_positions(p.sizes, [&](int64_t n, int64_t pixel) {
      for (int64_t c = 0; c < channels; ++c) mean[c] += static_cast<double>(x.at(n, pixel, first + c));
    });
    for (int64_t c = 0; c < channels; ++c) mean[c] /= count;
    for_positions(p.sizes, [&](int64_t n, int64_t pixel) {
      for (int64_t c = 0; c < channels; ++c) {
        const double centered = static_cast<double>(x.at(n, pixel, first + c)) - mean[c];
        squares[c] += centered * centered;
      }
    });
    Coefficients<A> at;
    for (int64_t c = 0; c < channels; ++c) {
      const double variance = squares[c] / count, invstd = 1 / std::sqrt(variance + p.eps);
      store_at<Halves>(p.mean, first + c, mean[c]);
      store_at<Halves>(p.invstd, first + c, invstd);
      update_statistics<Halves>(p, first + c, mean[c], variance, count);
      at.center[c] = static_cast<A>(mean[c]);
      at.scale[c] = static_cast<A>(invstd * load_at<Halves>(p.weight, first + c, 1));
      at.shift[c] = static_cast<A>(load_at<Halves>(p.bias, first + c, 0));
    }
    for_results<T, kAct>(p, first, channels, at,
                         [&](int64_t n, int64_t pixel, int64_t c, T result) { y.at(n, pixel, c) = result; });
  });
  if (p.num_batches_tracked) ++*p.num_batches_tracked;
}

template <class Halves, typename T, Activation kAct, typename ParallelFor>
void backward_as(const BackwardParams& p, const ParallelFor& parallel_for) {
  using A = typename Storage<T>::arithmetic;
  const Elements<const T> x(p.x), grad_y(p.grad_y);
  const Elements<T> grad_x(p.grad_x);
  const double count = static_cast<double>(p.sizes.images * p.sizes.pixels);
  const A slope = static_cast<A>(p.slope);
  for_channels(p.sizes, parallel_for, [&](int64_t first, int64_t channels) {
    std::array<A, kMostChannels> center, scale, shift, mean_dz, slope_dz;
    for (int64_t c = 0; c < channels; ++c) {
      center[c] = static_cast<A>(load_at<Halves>(p.mean, first + c, 0));
      scale[c] = static_cast<A>(load_at<Halves>(p.invstd, first + c, 0) * load_at<Halves>(p.weight, first + c, 1));
      shift[c] = static_cast<A>(load_at<Halves>(p.bias, first + c, 0));
    }
    // Return the gradient at the activation's input, and set x minus the mean.
    const auto dz_at = [&](int64_t n, int64_t pixel, int64_t c, A& centered) {
      centered = Storage<T>::load(x.at(n, pixel, first + c)) - center[c];
      const A grad = Storage<T>::load(grad_y.at(n, pixel, first + c));
      return activate_backward<kAct, false>(centered * scale[c] + shift[c], grad, slope);
    };
    Sums sum{}, product{};
    for_positions(p.sizes, [&](int64_t n, int64_t pixel) {
      for (int64_t c = 0; c < channels; ++c) {
        A centered;
        const A dz = dz_at(n, pixel, c, centered);
        sum[c] += dz;
        product[c] += static_cast<double>(dz) * centered;
      }
    });
    for (int64_t c = 0; c < channels; ++c) {
      const double invstd = load_at<Halves>(p.invstd, first + c, 0);
      store_at<Halves>(p.grad_weight, first + c, product[c] * invstd);
      store_at<Halves>(p.grad_bias, first + c, sum[c]);
      mean_dz[c] = static_cast<A>(sum[c] / count);
      slope_dz[c] = static_cast<A>(product[c] / count * invstd * invstd);
    }
    for_positions(p.sizes, [&](int64_t n, int64_t pixel) {
      for (int64_t c = 0; c < channels; ++c) {
        A centered;
        const A dz = dz_at(n, pixel, c, centered);
        grad_x.at(n, pixel, first + c) = Storage<T>::store((dz - mean_dz[c] - centered * slope_dz[c]) * scale[c]);
      }
    });
  });
}

// Call f(zero of the dtype, activation as a compile-time constant).
template <class Halves, typename Params, typename F>
void dispatch(const Params& p, F&& f) {
  with_dtype<Halves>(
      p.dtype, [&](auto zero) { dispatch_activation(p.activation, [&](auto activation) { f(zero, activation); }); });
}

template <class Halves, typename ParallelFor>
void forward(const ForwardParams& p, const ParallelFor& parallel_for) {
  dispatch<Halves>(p, [&](auto zero, auto activation) {
    forward_as<Halves, decltype(zero), decltype(activation)::value>(p, parallel_for);
  });
}

template <class Halves, typename ParallelFor>
void eval(const EvalParams& p, const ParallelFor& parallel_for) {
  dispatch<Halves>(p, [&](auto zero, auto activation) {
    eval_as<Halves, decltype(zero), decltype(activation)::value>(p, parallel_for);
  });
}

template <class Halves, typename ParallelFor>
void backward(const BackwardParams& p, const ParallelFor& parallel_for) {
  dispatch<Halves>(p, [&](auto zero, auto activation) {
    backward_as<Halves, decltype(zero), decltype(activation)::value>(p, parallel_for);
  });
}

}  // namespace
}  // namespace torch_fastdet::core::bn_act_loops
