// Compare upsample.cu with nested loops over (n, c, h, w): layouts, slices of a concatenation, unaligned storage, all
// types.
#include <gtest/gtest.h>

#include <array>

#include "core/upsample/upsample.h"
#include "dtypes.h"
#include "emulator.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core {
namespace {

using Size = std::vector<int64_t>;

// Return the strides of `size` inside a buffer of this many channels.
Size strides_of(const Size& size, int64_t channels, bool channels_last) {
  const int64_t h = size[2], w = size[3];
  return channels_last ? Size{h * w * channels, 1, w * channels, channels} : Size{channels * h * w, h * w, w, 1};
}

// A slice is a tensor of `size` that starts at `first_channel` of a larger buffer.
struct Slice {
  Tensor buffer;
  Size size, strides;
  int64_t first;

  Slice(DType dtype, Size size, int64_t channels, int64_t first_channel, bool channels_last, int64_t offset)
      : buffer(dtype, {size[0], channels, size[2], size[3]}, strides_of(size, channels, channels_last), offset),
        size(size),
        strides(buffer.strides),
        first(first_channel) {}
  int64_t index(int64_t n, int64_t c, int64_t h, int64_t w) const {
    return ((n * buffer.sizes[1] + first + c) * size[2] + h) * size[3] + w;
  }
  double get(int64_t n, int64_t c, int64_t h, int64_t w) const { return buffer.get(index(n, c, h, w)); }
  char* data() const { return static_cast<char*>(buffer.data()) + first * strides[1] * dtype_bytes(buffer.dtype); }
  void fill(Random& random) {
    for (int64_t i = 0; i < buffer.numel(); ++i) buffer.set(i, random.normal());
  }
};

void check(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  emulator::seed(seed);
  const DType dtype = random.one_of(kEveryDtype);
  const bool channels_last = random.chance(50);
  const Size size = {1 + random.below(2), random.one_of({1, 3, 4, 8, 24, 33}), 1 + random.below(9),
                     1 + random.below(20)};
  const Size doubled = {size[0], size[1], 2 * size[2], 2 * size[3]};
  const int64_t skipped = random.chance(50) ? random.one_of({1, 4, 8, 17}) : 0;
  const auto offset = [&] { return random.chance(70) ? 0 : random.below(8); };
  Slice x(dtype, size, size[1] + random.below(3) * 2, 0, channels_last, offset());
  Slice out(dtype, doubled, size[1] + skipped, 0, channels_last, offset());
  Size skip_size = doubled;
  skip_size[1] = skipped;
  Slice skip(dtype, skip_size, std::max<int64_t>(skipped, 1), 0, channels_last, offset());
  x.fill(random);
  skip.fill(random);

  UpsampleForwardParams p{};
  p.plan = make_upsample_plan(size.data(), x.strides.data(), out.strides.data(), channels_last);
  p.x = x.data();
  p.out = out.data();
  p.copy = make_copy_plan(skip_size.data(), skip.strides.data(), out.strides.data(), channels_last);
  p.skip = skip.data();
  p.skip_out = out.data() + size[1] * out.strides[1] * dtype_bytes(dtype);
  p.itemsize = static_cast<int>(dtype_bytes(dtype));
  ASSERT_EQ(launch_upsample_forward(p, nullptr), cudaSuccess);
  for (int64_t n = 0; n < size[0]; ++n) {
    for (int64_t h = 0; h < doubled[2]; ++h) {
      for (int64_t w = 0; w < doubled[3]; ++w) {
        for (int64_t c = 0; c < size[1]; ++c) ASSERT_EQ(out.get(n, c, h, w), x.get(n, c, h / 2, w / 2));
        for (int64_t c = 0; c < skipped; ++c) ASSERT_EQ(out.get(n, size[1] + c, h, w), skip.get(n, c, h, w));
      }
    }
  }
  EXPECT_TRUE(out.buffer.surroundings_intact());

  Slice grad_out(dtype, doubled, size[1] + skipped, skipped, channels_last, offset());
  Slice grad_x(dtype, size, size[1], 0, channels_last, offset());
  grad_out.fill(random);
  UpsampleBackwardParams b{};
  b.plan = make_upsample_plan(size.data(), grad_x.strides.data(), grad_out.strides.data(), channels_last);
  b.grad_out = grad_out.data();
  b.grad_x = grad_x.data();
  b.dtype = dtype;
  ASSERT_EQ(launch_upsample_backward(b, nullptr), cudaSuccess);
  for (int64_t n = 0; n < size[0]; ++n) {
    for (int64_t c = 0; c < size[1]; ++c) {
      for (int64_t h = 0; h < size[2]; ++h) {
        for (int64_t w = 0; w < size[3]; ++w) {
          const double square[] = {grad_out.get(n, c, 2 * h, 2 * w), grad_out.get(n, c, 2 * h, 2 * w + 1),
                                   grad_out.get(n, c, 2 * h + 1, 2 * w), grad_out.get(n, c, 2 * h + 1, 2 * w + 1)};
          float sum = 0;
          for (const double value : square) sum += static_cast<float>(value);
          const double want =
              dtype == DType::kFloat64 ? square[0] + square[1] + square[2] + square[3] : rounded(dtype, sum);
          ASSERT_EQ(grad_x.get(n, c, h, w), want);
        }
      }
    }
  }
  EXPECT_TRUE(grad_x.buffer.surroundings_intact());
}

TEST(UpsampleKernels, RandomShapesAndLayouts) {
  for (uint64_t seed = 0; seed < rounds(150) && !HasFailure(); ++seed) check(seed);
}

}  // namespace
}  // namespace torch_fastdet::core
