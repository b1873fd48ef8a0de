// Compare the kernel of filter_detections with its loop.
#include "core/nms/filter.h"
#include "dtypes.h"
#include "emulator.h"
#include "memory.h"

namespace torch_fastdet::core {
namespace {

struct Output {
  Tensor detections, counts, indices;

  Output(const FilterParams& p, DType wide)
      : detections(wide, {p.images, p.capacity, p.columns}),
        counts(DType::kFloat64, {p.images}),  // eight bytes each
        indices(DType::kFloat64, {p.images, p.capacity}) {}
  NmsOutput pointers() const {
    NmsOutput output;
    output.detections = detections.data();
    output.counts = static_cast<int64_t*>(counts.data());
    output.indices = static_cast<int64_t*>(indices.data());
    return output;
  }
};

TEST(FilterKernels, RandomRows) {
  for_each_seed(24, kEveryDtype, [](auto, uint64_t seed, DType dtype) {
    Random random(seed);
    emulator::seed(seed);
    const DType wide = arithmetic_dtype(dtype);
    FilterParams p;
    p.images = 1 + random.below(3);
    p.count = random.one_of({0, 1, 255, 300, 600});
    p.columns = 6 + random.below(3);
    p.capacity = random.one_of({0, 7, 300});
    p.confidence = rounded(dtype, 0.4);
    p.finite = seed % 3 == 0;
    p.dtype = dtype;
    const std::vector<int64_t> shape = {p.images, p.count, p.columns};
    Tensor rows(dtype, shape, seed % 2 ? Tensor::dense(shape) : std::vector<int64_t>{p.count * p.columns, 1, p.count});
    Tensor sizes(wide, {p.images, 2});
    for (int64_t i = 0; i < rows.numel(); ++i) {
      const bool odd = random.below(50) == 0;
      rows.set(i, odd ? NAN : i % p.columns == 5 ? static_cast<double>(random.below(5)) : 0.01 * random.below(100));
    }
    for (int64_t i = 0; i < 2 * p.images; ++i) sizes.set(i, 1 + static_cast<double>(random.below(900)));
    p.filter.active = seed % 4 < 2;
    p.filter.bits[0] = 0b10110;
    p.rows = rows.data();
    p.sizes = seed % 5 < 3 ? sizes.data() : nullptr;
    p.image_stride = rows.strides[0];
    p.row_stride = rows.strides[1];
    p.column_stride = rows.strides[2];
    const Output got(p, wide), want(p, wide);
    p.output = got.pointers();
    ASSERT_EQ(launch_filter(p, nullptr), cudaSuccess);
    p.output = want.pointers();
    with_dtype<Halves>(dtype, [&](auto zero) {
      for (int64_t image = 0; image < p.images; ++image) filter_image<decltype(zero)>(p, image);
    });
    for (const auto& [mine, theirs] :
         {std::pair{&got.detections, &want.detections}, {&got.counts, &want.counts}, {&got.indices, &want.indices}}) {
      EXPECT_TRUE(mine->surroundings_intact());
      for (int64_t i = 0; i < mine->numel(); ++i) ASSERT_TRUE(identical(mine->get(i), theirs->get(i))) << seed;
    }
  });
}

}  // namespace
}  // namespace torch_fastdet::core
