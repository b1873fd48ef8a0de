// Compare masks.cu with the CPU's bands (masks_loops.h, which tests/ops/test_masks.py compares with the definition):
// any strides, windows, factors and formats; boxes that miss the tile, cross it, are empty or NaN.
#include <gtest/gtest.h>

#include "core/masks/masks_loops.h"
#include "core/masks/masks_plan.h"
#include "emulator.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core {
namespace {

MaskAxis draw_axis(Random& random) {
  MaskAxis axis;
  axis.in = static_cast<int32_t>(random.one_of({1, 3, 17, 40}));
  axis.factor = static_cast<int32_t>(random.one_of({1, 1, 2, 4}));
  const int64_t enlarged = static_cast<int64_t>(axis.in) * axis.factor;
  axis.begin = random.chance(50) ? 0 : static_cast<int32_t>(random.below(enlarged));
  axis.span = static_cast<int32_t>(1 + random.below(enlarged - axis.begin));
  if (random.chance(30)) axis.begin = 0, axis.span = static_cast<int32_t>(enlarged);
  axis.size = static_cast<int32_t>(random.chance(25)   ? axis.span
                                   : random.chance(50) ? 1 + random.below(300)
                                                       : 4 * static_cast<int64_t>(axis.in));
  return axis;
}

float draw_corner(Random& random, int32_t size) {
  if (random.chance(3)) return NAN;
  if (random.chance(5)) return random.chance(50) ? INFINITY : -INFINITY;
  return static_cast<float>(random.below(8 * size + 16) - 4 * size / 2) / 4;
}

// A problem has exactly as much memory as it needs.
struct Problem {
  MasksParams p;
  Tensor protos, floats, coefficients, boxes;

  explicit Problem(Random& random) : Problem(random, draw(random)) {}

  // Return a problem with more masks than one group has.
  static Problem of_groups(Random& random) {
    Sizes sizes = draw(random);
    MasksParams& p = sizes.p;
    p.count = 2 * kMaskGroup + 1 + random.below(kMaskGroup);
    p.channels = 3;
    p.rows.size = static_cast<int32_t>(1 + random.below(40)),
    p.columns.size = static_cast<int32_t>(8 + random.below(40));
    return Problem(random, sizes);
  }

 private:
  struct Sizes {
    MasksParams p;
    DType type;
    bool channels_last;
  };

  static Sizes draw(Random& random) {
    MasksParams p;
    p.images = 1 + random.below(2), p.count = random.one_of({1, 7, 8, 9, 31, 33, 70});
    p.channels = random.one_of({0, 1, 5, 32, 33});
    p.rows = draw_axis(random), p.columns = draw_axis(random);
    p.columns.factor = p.rows.factor;  // one for both axes
    const int32_t enlarged = p.columns.in * p.columns.factor;
    p.columns.begin = std::min(p.columns.begin, enlarged - 1);
    p.columns.span = std::min(p.columns.span, enlarged - p.columns.begin);
    p.sigmoid = random.chance(40), p.crop_first = random.chance(30);
    p.scale_x = random.chance(50) ? 1.f : 0.3f, p.scale_y = random.chance(50) ? 1.f : 0.7f;
    p.format = random.one_of({MaskFormat::kBytes, MaskFormat::kFloats, MaskFormat::kBits});
    return {p, random.one_of({DType::kFloat32, DType::kFloat16, DType::kBFloat16}), random.chance(40)};
  }

  static Tensor make_protos(const Sizes& sizes, DType type, bool channels_last) {
    const MasksParams& p = sizes.p;
    const int64_t c = p.channels, h = p.rows.in, w = p.columns.in;
    const std::vector<int64_t> last = {c * h * w, 1, w * c, c}, first = {c * h * w, h * w, w, 1};
    return Tensor(type, {p.images, c, h, w}, channels_last ? last : first);
  }

  Problem(Random& random, const Sizes& sizes)
      : p(sizes.p),
        protos(make_protos(sizes, sizes.type, sizes.channels_last)),
        floats(make_protos(sizes, DType::kFloat32, false)),
        coefficients(DType::kFloat32, {p.images, p.count, p.channels}),
        boxes(DType::kFloat32, {p.images, p.count, 4}) {
    for (int64_t i = 0; i < protos.numel(); ++i) {
      protos.set(i, random.normal());
      floats.set(i, protos.get(i));
    }
    for (int64_t i = 0; i < coefficients.numel(); ++i) coefficients.set(i, random.normal());
    for (int64_t i = 0; i < boxes.numel(); ++i) boxes.set(i, draw_corner(random, i % 2 ? p.rows.size : p.columns.size));
    p.coefficients = static_cast<const float*>(coefficients.data()), p.boxes = static_cast<const float*>(boxes.data());
    p.coefficient_stride[0] = p.count * p.channels, p.coefficient_stride[1] = p.channels;
    p.box_stride[0] = p.count * 4, p.box_stride[1] = 4;
  }

 public:
  int64_t out_bytes() const {
    const int64_t row = p.format == MaskFormat::kBits ? packed_bytes(p.columns.size) : p.columns.size;
    return p.images * p.count * p.rows.size * row * (p.format == MaskFormat::kFloats ? 4 : 1);
  }

  MasksParams with(const Tensor& values, const Memory& out) const {
    MasksParams params = p;
    params.protos = values.data(), params.proto_type = values.dtype, params.out = out.data();
    std::copy(values.strides.begin(), values.strides.end(), params.proto_stride);
    return params;
  }
};

void expect_what_the_bands_make(const Problem& problem) {
  const Memory found(problem.out_bytes()), wanted(problem.out_bytes());
  ASSERT_EQ(launch_masks(problem.with(problem.protos, found), nullptr), cudaSuccess);
  const MasksParams bands = problem.with(problem.floats, wanted);
  mask_bands_between(bands, MaskTables(bands), 0, mask_bands(bands));
  ASSERT_EQ(std::memcmp(found.data(), wanted.data(), found.size()), 0);
}

TEST(MasksKernels, MakeWhatTheBandsMake) {
  for (uint64_t seed = 0; seed < rounds(60); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    emulator::seed(seed);
    ASSERT_NO_FATAL_FAILURE(expect_what_the_bands_make(Problem(random)));
  }
}

TEST(MasksKernels, DivideMoreMasksThanAGroupHas) {
  for (uint64_t seed = 0; seed < rounds(6); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    emulator::seed(seed);
    ASSERT_NO_FATAL_FAILURE(expect_what_the_bands_make(Problem::of_groups(random)));
  }
}

// Shared memory is allocated for the plan's bounds.
TEST(MasksPlan, TilesNeedNoMorePrototypesThanThereIsRoomFor) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    MasksParams p;
    p.rows = draw_axis(random), p.columns = draw_axis(random);
    const MaskTile tile = plan_mask_tiles(p);
    const auto most = [&](const MaskAxis& axis, int pixels, bool dense) {
      int count = 0;
      for (int32_t begin = 0; begin < axis.size; begin += pixels) {
        const int32_t end = std::min(begin + pixels, axis.size) - 1;
        count = std::max(count, dense ? taps_of(axis, end).first - taps_of(axis, begin).first + tile.taps
                                      : tile.taps * (end - begin + 1));
      }
      return count;
    };
    const int width = most(p.columns, tile.width, tile.dense_columns);
    const int height = most(p.rows, tile.height, tile.dense_rows);
    ASSERT_LE(width, kLowWidth) << seed;
    ASSERT_LE(height, kLowHeight) << seed;
    ASSERT_LE(width * height, kLowPixels) << seed;
  }
}

}  // namespace
}  // namespace torch_fastdet::core
