// Compare stem_conv_loops.h with the definition, output by output.
#include <gtest/gtest.h>

#include <vector>

#include "core/stem_conv/stem_conv_loops.h"

namespace torch_fastdet::core {
namespace {

// Return small integers, whose sums are exact.
std::vector<double> numbers(int64_t count, int64_t step) {
  std::vector<double> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<double>(i * step % 7 - 3);
  return values;
}

class Loops : public ::testing::TestWithParam<int64_t> {
 protected:
  // Return the square's channel that a tap of the pixel reads, or zero outside the image.
  double square(int64_t n, int64_t y, int64_t x, int64_t tap, int64_t c) const {
    const int64_t row = y + tap / sizes_.side - sizes_.border(), column = x + tap % sizes_.side - sizes_.border();
    if (row < 0 || column < 0 || row >= sizes_.square_height() || column >= sizes_.square_width()) return 0;
    return squares_[((n * sizes_.square_height() + row) * sizes_.square_width() + column) * kStemChannels + c];
  }

  const StemConvSizes sizes_{2, 3, 4, 16, GetParam()};
  const int64_t taps_ = sizes_.side * sizes_.side, pixels_ = sizes_.batch * sizes_.height * sizes_.width;
  const std::vector<double> squares_ =
      numbers(sizes_.batch * sizes_.square_height() * sizes_.square_width() * kStemChannels, 3);
};

TEST_P(Loops, Forward) {
  const std::vector<double> weight = numbers(sizes_.weights(), 5);
  std::vector<double> out(pixels_ * sizes_.outputs);
  const StemConvForwardParams params{sizes_, squares_.data(), weight.data(), out.data(), DType::kFloat64};
  stem_conv_forward_rows<double>(params, 0, 2);
  stem_conv_forward_rows<double>(params, 2, sizes_.batch * sizes_.height);
  for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
    const int64_t k = i % sizes_.outputs, pixel = i / sizes_.outputs;
    double want = 0;
    for (int64_t j = 0; j < taps_ * kStemChannels; ++j) {
      want += weight[k * taps_ * kStemChannels + j] *
              square(pixel / 12, pixel / 4 % 3, pixel % 4, j / kStemChannels, j % kStemChannels);
    }
    ASSERT_EQ(out[i], want) << i;
  }
}

TEST_P(Loops, Backward) {
  const std::vector<double> grads = numbers(pixels_ * sizes_.outputs, 2);
  std::vector<double> grad_weight(sizes_.weights());
  const StemConvBackwardParams params{sizes_, grads.data(),   squares_.data(), grad_weight.data(), nullptr,
                                      0,      DType::kFloat64};
  stem_conv_backward_outputs<double>(params, 0, 5);
  stem_conv_backward_outputs<double>(params, 5, sizes_.outputs);
  for (int64_t i = 0; i < sizes_.weights(); ++i) {
    const int64_t c = i % kStemChannels, tap = i / kStemChannels % taps_, k = i / kStemChannels / taps_;
    double want = 0;
    for (int64_t pixel = 0; pixel < pixels_; ++pixel) {
      want += grads[pixel * sizes_.outputs + k] * square(pixel / 12, pixel / 4 % 3, pixel % 4, tap, c);
    }
    ASSERT_EQ(grad_weight[i], want) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Sides, Loops, ::testing::Values(2, 3));

}  // namespace
}  // namespace torch_fastdet::core
