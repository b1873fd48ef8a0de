// Compare jpeg.cu with the CPU's loops, which test_jpeg.cpp compares with nested loops: many images and rectangles in
// one call, damaged packed JPEGs, and plans that make no sense.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "../jpeg_files.h"
#include "core/jpeg/jpeg_loops.h"
#include "core/jpeg/jpeg_pack.h"
#include "core/jpeg/jpeg_plan.h"
#include "emulator.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core {
namespace {

// A problem has exactly as much memory as it needs.
struct Problem {
  Random random;
  std::vector<uint8_t> storage;
  std::vector<int64_t> plan;
  JpegTotals totals;
  int64_t out_bytes = 0;

  explicit Problem(uint64_t seed) : random(seed) {
    std::vector<int64_t> offsets;
    for (int i = 0; i < 3; ++i) {
      const RandomJpeg jpeg(seed * 3 + static_cast<uint64_t>(i), random.chance(20) ? 300 : 60);
      std::vector<uint8_t> packed;
      JpegPacker packer(static_cast<int>(random.below(kJpegMaxSegmentBits + 1)));
      EXPECT_EQ(packer.pack(jpeg.bytes.data(), static_cast<int64_t>(jpeg.bytes.size()), packed), nullptr);
      offsets.push_back(static_cast<int64_t>(storage.size()));
      storage.insert(storage.end(), packed.begin(), packed.end());
    }
    const int64_t rows = 1 + random.below(5);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t offset = offsets[static_cast<size_t>(random.below(3))];
      const JpegHeader& h = header(offset);
      int64_t x = random.below(jpeg_shown_width(h)), y = random.below(jpeg_shown_height(h));
      if (random.chance(40)) x = y = 0;
      int64_t width = 1 + random.below(jpeg_shown_width(h) - x), height = 1 + random.below(jpeg_shown_height(h) - y);
      if (random.chance(30)) width = jpeg_shown_width(h) - x, height = jpeg_shown_height(h) - y;
      if (random.chance(5)) width = 0;
      const int64_t pitch = random.chance(50) ? (3 * width + 7) / 8 * 8 : 3 * width + random.below(3);
      out_bytes += random.chance(50) ? (8 - out_bytes % 8) % 8 : random.below(3);
      plan.insert(plan.end(), {offset, x, y, width, height, out_bytes, pitch});
      plan.resize(plan.size() + kJpegColumns - kJpegAskedColumns);
      out_bytes += pitch * height;
    }
    totals = complete_jpeg_plan(plan.data(), rows, [&](int64_t i) -> const JpegHeader& {
      return header(plan[static_cast<size_t>(i * kJpegColumns + kJpegOffset)]);
    });
  }

  const JpegHeader& header(int64_t offset) const {
    return *reinterpret_cast<const JpegHeader*>(storage.data() + offset);
  }

  JpegParams params(uint8_t* out) const {
    JpegParams p{};
    p.storage = storage.data(), p.storage_bytes = static_cast<int64_t>(storage.size());
    p.plan = plan.data(), p.images = static_cast<int64_t>(plan.size()) / kJpegColumns;
    p.out = out, p.out_bytes = out_bytes;
    p.decoded_bytes = totals.decoded_bytes, p.groups = totals.groups, p.tiles = totals.tiles;
    return p;
  }

  std::vector<uint8_t> on_cpu() const {
    std::vector<uint8_t> out(static_cast<size_t>(out_bytes), 0x5a);
    decode_jpegs(params(out.data()), [](int64_t begin, int64_t end, int64_t, const auto& f) { f(begin, end); });
    return out;
  }

  std::vector<uint8_t> on_gpu(int64_t spare = 0) {
    const Memory out(static_cast<size_t>(out_bytes));
    // The storage is exactly as large as it says, so that a sanitizer sees reads past it.
    const Memory packed(storage.size());
    std::copy(storage.begin(), storage.end(), packed.data());
    JpegParams p = params(reinterpret_cast<uint8_t*>(out.data()));
    p.storage = reinterpret_cast<const uint8_t*>(packed.data());
    p.decoded_bytes += spare * 256, p.groups += spare, p.tiles += spare;
    const JpegWorkspace shared(p.images, p.groups, p.tiles);
    const Memory workspace(static_cast<size_t>(shared.end + p.decoded_bytes));
    p.workspace = reinterpret_cast<uint8_t*>(workspace.data());
    EXPECT_EQ(launch_jpeg_decode(p, nullptr), cudaSuccess);
    return {out.data(), out.data() + out_bytes};
  }
};

TEST(JpegKernels, PixelsAreThoseOfTheCpu) {
  for (uint64_t seed = 0; seed < rounds(60); ++seed) {
    emulator::seed(seed);
    Problem problem(seed);
    ASSERT_EQ(problem.on_gpu(static_cast<int64_t>(seed % 3)), problem.on_cpu()) << seed;
  }
}

TEST(JpegKernels, DamagedScansGiveAnyPixelsAndTouchNothingElse) {
  for (uint64_t seed = 0; seed < rounds(60); ++seed) {
    emulator::seed(seed);
    Problem problem(seed);
    for (int i = 0; i < 20; ++i) {
      const int64_t at = problem.random.below(static_cast<int64_t>(problem.storage.size()));
      problem.storage[static_cast<size_t>(at)] = static_cast<uint8_t>(problem.random.below(256));
    }
    problem.on_gpu();
  }
}

TEST(JpegKernels, RowsThatMakeNoSenseAreSkipped) {
  for (uint64_t seed = 0; seed < rounds(60); ++seed) {
    emulator::seed(seed);
    Problem problem(seed);
    const int64_t at = problem.random.below(static_cast<int64_t>(problem.plan.size()));
    problem.plan[static_cast<size_t>(at)] = problem.random.one_of<int64_t>({-1, 1, 3, 1000, int64_t{1} << 40});
    problem.on_gpu();
  }
}

}  // namespace
}  // namespace torch_fastdet::core
