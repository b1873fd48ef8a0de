// Compare the kernels of non-maximum suppression with nms_problem.h.
#include <gtest/gtest.h>

#include "core/nms/nms_launch.h"
#include "core/nms/scale_boxes_math.h"
#include "emulator.h"
#include "nms_problem.h"

namespace torch_fastdet::core::nms_problem {
namespace {

struct Kernels {
  static void seed(uint64_t seed) { emulator::seed(seed); }
  static bool suppress(const Problem& problem, const NmsOutput& output, const NmsPlan& plan) {
    const Memory workspace(std::max<size_t>(plan.bytes, 1));
    const cudaError_t error =
        launch_nms(problem.source, problem.options, problem.filter, output, plan, workspace.data(), nullptr);
    return error == cudaSuccess && cudaGetLastError() == cudaSuccess;
  }
  static bool decode(const DecodeParams& params) { return launch_yolov5_decode(params, nullptr) == cudaSuccess; }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Kernels, Nms, Kernels);

TEST(ScaleBoxesKernels, RandomBoxes) {
  for (uint64_t seed = 0; seed < rounds(24) && !HasFailure(); ++seed) {
    Random random(seed);
    emulator::seed(seed);
    const DType dtype = kTypes[seed % 4], wide = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
    const int64_t images = 1 + random.below(3), count = random.one_of({0, 1, 100, 300}), columns = 4 + random.below(3);
    const std::vector<int64_t> sizes = {images, count, columns};
    Tensor boxes(dtype, sizes, seed % 3 ? Tensor::dense(sizes) : std::vector<int64_t>{count * columns, 1, count});
    Tensor letterboxes(wide, {images, 6}), got(dtype, sizes), want(dtype, sizes);
    for (int64_t i = 0; i < boxes.numel(); ++i) boxes.set(i, 200 * random.normal());
    for (int64_t i = 0; i < 6 * images; ++i) letterboxes.set(i, 1 + static_cast<double>(random.below(300)));
    ScaleBoxesParams p{boxes.data(),     letterboxes.data(), got.data(),       images,        count, columns,
                       boxes.strides[0], boxes.strides[1],   boxes.strides[2], seed % 2 == 0, dtype};
    ASSERT_EQ(launch_scale_boxes(p, nullptr), cudaSuccess);
    p.output = want.data();
    with_dtype<Halves>(dtype, [&](auto zero) {
      for (int64_t i = 0; i < images * count; ++i) scale_one_box<decltype(zero)>(p, i);
    });
    EXPECT_EQ(got.values(), want.values());
  }
}

}  // namespace
}  // namespace torch_fastdet::core::nms_problem
