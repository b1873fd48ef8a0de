// Compare crop.cu with the CPU's rows: all types, rows that vectors fit or do not, in place and not.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/common/dtype.cuh"
#include "core/masks/crop.h"
#include "dtypes.h"
#include "emulator.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core {
namespace {

// Fill in bits of any type except NaN, whose sign may differ.
void fill(const Memory& memory, const CropParams& p, int64_t pixels, int64_t offset, Random& random) {
  for (int64_t i = 0; i < pixels; ++i) {
    if (p.integer_bytes) {
      for (int byte = 0; byte < p.integer_bytes; ++byte) {
        memory.data()[(offset + i) * p.integer_bytes + byte] = static_cast<char>(random.below(256));
      }
    } else {
      store_as(p.dtype, memory.data() + (offset + i) * dtype_bytes(p.dtype), random.normal());
    }
  }
}

void expect_what_the_rows_make(Random& random) {
  CropParams p;
  p.count = 1 + random.below(9);
  p.height = static_cast<int32_t>(1 + random.below(20)), p.width = static_cast<int32_t>(1 + random.below(150));
  if (random.chance(50)) p.width = (p.width + 15) / 16 * 16;
  p.integer_bytes = random.chance(50) ? random.one_of({1, 2, 4, 8}) : 0;
  p.dtype = random.one_of(kEveryDtype);
  p.box_stride = random.one_of({4, 6});
  const int64_t itemsize = p.integer_bytes ? p.integer_bytes : dtype_bytes(p.dtype),
                pixels = p.count * p.height * p.width;
  const int64_t offset = random.chance(30) ? 1 : 0;
  std::vector<float> boxes(p.count * p.box_stride);
  for (size_t i = 0; i < boxes.size(); ++i) {
    boxes[i] = random.chance(3) ? NAN : static_cast<float>(random.below(4 * p.width + 8) - p.width) / 2;
  }
  p.boxes = boxes.data();
  const Memory masks((pixels + offset) * itemsize), found(masks.size()), wanted(masks.size());
  fill(masks, p, pixels, offset, random);
  const bool in_place = random.chance(50);
  if (in_place) std::memcpy(found.data(), masks.data(), masks.size());
  if (in_place) std::memcpy(wanted.data(), masks.data(), masks.size());
  p.out = found.data() + offset * itemsize;
  p.masks = in_place ? p.out : masks.data() + offset * itemsize;
  ASSERT_EQ(launch_crop(p, nullptr), cudaSuccess);
  p.out = wanted.data() + offset * itemsize;
  p.masks = in_place ? p.out : p.masks;
  const int64_t rows = p.count * p.height;
  const auto crop = [&](auto zero) { crop_rows<decltype(zero)>(p, 0, rows); };
  p.integer_bytes ? with_integer(p.integer_bytes, crop) : dispatch(p.dtype, crop);
  ASSERT_EQ(std::memcmp(found.data(), wanted.data(), found.size()), 0);
}

TEST(CropKernels, MakeWhatTheRowsMake) {
  for (uint64_t seed = 0; seed < rounds(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    emulator::seed(seed);
    ASSERT_NO_FATAL_FAILURE(expect_what_the_rows_make(random));
  }
}

}  // namespace
}  // namespace torch_fastdet::core
