// Run stem_conv on the CPU with plain loops, for tests and tracing.
#pragma once

#include "core/common/storage.h"
#include "core/stem_conv/stem_conv.h"

namespace torch_fastdet::core {

// Call f(index of the square's first channel, tap) for each square that the output pixel (n, y, x) reads.
template <typename F>
void for_stem_taps(const StemConvSizes& s, int64_t n, int64_t y, int64_t x, F&& f) {
  for (int64_t tap = 0; tap < s.side * s.side; ++tap) {
    const int64_t row = y + tap / s.side - s.border(), column = x + tap % s.side - s.border();
    if (row < 0 || column < 0 || row >= s.square_height() || column >= s.square_width()) continue;
    f(((n * s.square_height() + row) * s.square_width() + column) * kStemChannels, tap);
  }
}

template <typename T>
void stem_conv_forward_rows(const StemConvForwardParams& p, int64_t begin, int64_t end) {
  using A = arithmetic_t<T>;
  const StemConvSizes& s = p.sizes;
  const T *const squares = static_cast<const T*>(p.squares), *const weight = static_cast<const T*>(p.weight);
  for (int64_t pixel = begin * s.width; pixel < end * s.width; ++pixel) {
    T* const out = static_cast<T*>(p.out) + pixel * s.outputs;
    for (int64_t k = 0; k < s.outputs; ++k) {
      A sum = 0;
      for_stem_taps(s, pixel / s.width / s.height, pixel / s.width % s.height, pixel % s.width,
                    [&](int64_t square, int64_t tap) {
                      const T* const row = weight + (k * s.side * s.side + tap) * kStemChannels;
                      for (int c = 0; c < kStemChannels; ++c) {
                        sum += to_arithmetic(squares[square + c]) * to_arithmetic(row[c]);
                      }
                    });
      out[k] = from_arithmetic<T>(sum);
    }
  }
}

// Compute the weights' gradients of outputs `begin` to `end`. Sums are float64, as there are as many terms as pixels.
template <typename T>
void stem_conv_backward_outputs(const StemConvBackwardParams& p, int64_t begin, int64_t end) {
  const StemConvSizes& s = p.sizes;
  const T *const squares = static_cast<const T*>(p.squares), *const grads = static_cast<const T*>(p.grad_out);
  const int64_t weights = s.side * s.side * kStemChannels;
  for (int64_t k = begin; k < end; ++k) {
    double sums[9 * kStemChannels] = {};
    for (int64_t pixel = 0; pixel < s.batch * s.height * s.width; ++pixel) {
      const double grad = to_arithmetic(grads[pixel * s.outputs + k]);
      for_stem_taps(s, pixel / s.width / s.height, pixel / s.width % s.height, pixel % s.width,
                    [&](int64_t square, int64_t tap) {
                      for (int c = 0; c < kStemChannels; ++c) {
                        sums[tap * kStemChannels + c] += grad * to_arithmetic(squares[square + c]);
                      }
                    });
    }
    T* const out = static_cast<T*>(p.grad_weight) + k * weights;
    for (int64_t i = 0; i < weights; ++i) out[i] = from_arithmetic<T>(static_cast<arithmetic_t<T>>(sums[i]));
  }
}

}  // namespace torch_fastdet::core
