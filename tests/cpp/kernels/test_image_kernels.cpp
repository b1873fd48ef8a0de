// Compare image.cu with the CPU's rows over random tables, some of which make no sense, and the fused pass with a
// canvas that is built pixel by pixel.
#include <gtest/gtest.h>

#include <vector>

#include "core/image/augment_rows.h"
#include "core/image/resize_rows.h"
#include "emulator.h"
#include "memory.h"
#include "random.h"
#if defined(__x86_64__)
#include "core/image/augment_avx2.h"
#endif

namespace torch_fastdet::core {
namespace {

struct Source {
  int64_t storage, offset, height, width;
};

// A problem has exactly as much memory as it needs.
struct Problem {
  Random random;
  int channels;
  std::vector<Memory> memory;
  std::vector<Source> sources;
  std::vector<int64_t> placements, layers, images;
  std::vector<double> matrices, blend;
  std::vector<uint8_t> tables, masks;
  AugmentParams params{};

  Problem(uint64_t seed, int channels, bool with_nonsense = true) : random(seed), channels(channels) {
    params.storages.count = 2;
    for (int storage = 0; storage < 2; ++storage) {
      int64_t bytes = 0;
      for (int i = 0; i < 4; ++i) {
        const Source source{storage, bytes, 1 + random.below(30), 1 + random.below(30)};
        sources.push_back(source);
        bytes += source.height * source.width * channels;
      }
      memory.emplace_back(static_cast<size_t>(bytes));
      for (int64_t i = 0; i < bytes; ++i) memory.back().data()[i] = static_cast<char>(random.below(256));
      params.storages.size[storage] = bytes;
    }
    for (int i = 0; i < 2; ++i) params.storages.data[i] = reinterpret_cast<const uint8_t*>(memory[i].data());
    params.arithmetic = random.chance(70) ? WarpArithmetic::kFixed : WarpArithmetic::kFloat;
    params.hsv_lanes = static_cast<int>(random.one_of({0, 8, 32}));
    BatchOut& out = params.out;
    out.type = random.one_of({PixelType::kUint8, PixelType::kFloat32});
    out.channels_last = random.chance(50);
    out.batch = 1 + random.below(3);
    out.channels = channels;
    out.height = static_cast<int>(1 + random.below(40));
    out.width = static_cast<int>(1 + random.below(80));
    masks.resize(50 * 50);
    for (uint8_t& mask : masks) mask = random.chance(30);
    tables.resize(2 * 768);
    for (uint8_t& level : tables) level = static_cast<uint8_t>(random.below(256));
    for (int64_t i = 0; i < out.batch; ++i) {
      const int64_t first = add_layer(), second = random.chance(40) ? add_layer() : -1;
      images.insert(images.end(), {first, second, random.below(8), random.below(4) - 1});
      blend.push_back(0.01 * static_cast<double>(random.below(101)));
    }
    if (with_nonsense && random.chance(20))
      placements[random.below(static_cast<int64_t>(placements.size()))] = random.below(1 << 30);
    if (with_nonsense && random.chance(20))
      layers[random.below(static_cast<int64_t>(layers.size()))] = random.below(64) - 32;
    params.placements = placements.data();
    params.layers = layers.data();
    params.matrices = matrices.data();
    params.images = images.data();
    params.blend = random.chance(90) ? blend.data() : nullptr;
    params.tables = random.chance(90) ? tables.data() : nullptr;
    params.masks = random.chance(90) ? masks.data() : nullptr;
    params.placement_rows = static_cast<int64_t>(placements.size()) / kPlacementColumns;
    params.layer_rows = static_cast<int64_t>(layers.size()) / kLayerColumns;
    params.table_rows = 2;
    params.mask_bytes = static_cast<int64_t>(masks.size());
  }

  int64_t add_layer() {
    const int64_t first = static_cast<int64_t>(placements.size()) / kPlacementColumns, count = 1 + random.below(5);
    const int64_t height = 1 + random.below(50), width = 1 + random.below(50);
    for (int64_t i = 0; i < count; ++i) {
      const Source& s = sources[random.below(static_cast<int64_t>(sources.size()))];
      placements.insert(placements.end(), {s.storage, s.offset, s.height, s.width, random.below(s.width + 2) - 1,
                                           random.below(s.height + 2) - 1, random.below(width + 5) - 5,
                                           random.below(height + 5) - 5, random.below(40), random.below(40)});
    }
    layers.insert(layers.end(),
                  {first, count, height, width, random.below(3), random.chance(20) ? random.below(20) : -1});
    double m[] = {1, 0, 0, 0, 1, 0, 0, 0, 1};
    if (random.chance(80)) {
      for (int i = 0; i < 6; ++i) m[i] += i % 3 == 2 ? 10 * random.normal() : 0.4 * random.normal();
      m[6] = 0.002 * random.normal();
      m[7] = 0.002 * random.normal();
    }
    matrices.insert(matrices.end(), m, m + 9);
    return static_cast<int64_t>(layers.size()) / kLayerColumns - 1;
  }

  size_t out_bytes() const {
    const BatchOut& out = params.out;
    return static_cast<size_t>(out.batch * channels * out.height * out.width) *
           (out.type == PixelType::kUint8 ? 1 : sizeof(float));
  }
};

// Return every level as float32, which is the CPU's table.
std::vector<float> float_levels() {
  std::vector<float> levels(256);
  for (int i = 0; i < 256; ++i) levels[i] = normalised(i, false);
  return levels;
}

std::vector<RowKernels> all_row_kernels() {
  std::vector<RowKernels> kernels{plain_row_kernels()};
#if defined(__x86_64__)
  if (has_avx2()) kernels.push_back(row_kernels_avx2());
#endif
  return kernels;
}

template <int kChannels>
void check_augment(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  emulator::seed(seed);
  Problem problem(seed, kChannels);
  AugmentParams& p = problem.params;
  Memory kernel(problem.out_bytes()), rows(problem.out_bytes());
  p.out.data = kernel.data();
  ASSERT_EQ(launch_image_augment(p, nullptr), cudaSuccess);
  p.out.data = rows.data();
  const std::vector<float> levels = float_levels();
  for (const RowKernels& kernels : all_row_kernels()) {
    const RowStore store{p.out, levels.data(), kernels};
    for (int64_t n = 0; n < p.out.batch; ++n) {
      const int middle = static_cast<int>(problem.random.below(p.out.height + 1));
      AugmentImage<kChannels>(p, n, store).run(0, middle);
      AugmentImage<kChannels>(p, n, store).run(middle, p.out.height);
    }
    ASSERT_EQ(std::memcmp(kernel.data(), rows.data(), problem.out_bytes()), 0);
  }
}

TEST(ImageKernels, AugmentEqualsRows) {
  for (uint64_t seed = 0; seed < rounds(120) && !HasFailure(); ++seed) {
    check_augment<3>(seed);
    check_augment<1>(seed + 1000);
  }
}

// Without a warp the pass samples the canvas that placements fill one after another.
TEST(ImageKernels, AugmentPlacesImagesInOrder) {
  for (uint64_t seed = 0; seed < rounds(40) && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Problem problem(seed, 3, /*with_nonsense=*/false);
    AugmentParams& p = problem.params;
    for (size_t i = 0; i < problem.layers.size(); i += kLayerColumns) {
      problem.layers[i + 4] = 0;
      problem.layers[i + 5] = -1;
    }
    for (size_t i = 0; i < problem.images.size(); i += kImageColumns) problem.images[i + 2] = kKeepBgr;
    p.tables = nullptr;
    p.blend = nullptr;
    p.out.type = PixelType::kUint8;
    p.out.channels_last = true;
    Memory out(problem.out_bytes());
    p.out.data = out.data();
    ASSERT_EQ(launch_image_augment(p, nullptr), cudaSuccess);
    for (int64_t n = 0; n < p.out.batch; ++n) {
      std::vector<uint8_t> canvas(static_cast<size_t>(p.out.height) * p.out.width * 3, kBorder);
      const int64_t* layer = p.layers + p.images[n * kImageColumns] * kLayerColumns;
      for (int64_t i = 0; i < layer[1]; ++i) {
        const int64_t* row = p.placements + (layer[0] + i) * kPlacementColumns;
        for (int64_t dy = 0; dy < row[9]; ++dy) {
          for (int64_t dx = 0; dx < row[8]; ++dx) {
            const int64_t x = row[6] + dx, y = row[7] + dy, sx = row[4] + dx, sy = row[5] + dy;
            if (x < 0 || y < 0 || x >= layer[3] || y >= layer[2] || x >= p.out.width || y >= p.out.height) continue;
            if (sx < 0 || sy < 0 || sx >= row[3] || sy >= row[2]) continue;
            const uint8_t* from = p.storages.data[row[0]] + row[1] + (sy * row[3] + sx) * 3;
            std::copy(from, from + 3, canvas.begin() + (y * p.out.width + x) * 3);
          }
        }
      }
      ASSERT_EQ(std::memcmp(out.data() + n * static_cast<int64_t>(canvas.size()), canvas.data(), canvas.size()), 0);
    }
  }
}

// Sizes of one image's source and target meet every rule, including integer factors and single rows and columns.
struct Sizes {
  int64_t h, w, new_h, new_w;
};

Sizes random_sizes(Random& random) {
  const int64_t new_h = 1 + random.below(40), new_w = 1 + random.below(40);
  if (random.chance(20)) return {2 * new_h, 2 * new_w, new_h, new_w};
  if (random.chance(20)) return {3 * new_h, new_w * (1 + random.below(3)), new_h, new_w};
  if (random.chance(10)) return {new_h, new_w, new_h, new_w};
  return {1 + random.below(60), 1 + random.below(60), new_h, new_w};
}

template <int kChannels>
std::vector<uint8_t> resized(const uint8_t* source, int64_t pitch, const Sizes& s, int64_t interpolation) {
  const Resize resize = make_resize(static_cast<int>(s.w), static_cast<int>(s.h), static_cast<int>(s.new_w),
                                    static_cast<int>(s.new_h), static_cast<Interpolation>(interpolation));
  ResizeRows<kChannels> rows(source, pitch, resize, plain_resize_kernels());
  std::vector<uint8_t> out(static_cast<size_t>(s.new_h * s.new_w * kChannels));
  for (int y = 0; y < s.new_h; ++y) rows.row(y, out.data() + y * s.new_w * kChannels);
  return out;
}

template <int kChannels>
void check_resize(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  emulator::seed(seed);
  Random random(seed);
  const Sizes s = random_sizes(random);
  const int64_t pitch = s.w * kChannels, interpolation = random.below(2), shift = random.below(5);
  Memory source(static_cast<size_t>(shift + s.h * pitch));
  for (size_t i = 0; i < source.size(); ++i) source.data()[i] = static_cast<char>(random.below(256));
  const auto* bytes = reinterpret_cast<const uint8_t*>(source.data());
  const std::vector<uint8_t> want = resized<kChannels>(bytes + shift, pitch, s, interpolation);
  const int64_t size = static_cast<int64_t>(want.size());
  Memory out(want.size() + 3);
  // The second row is skipped because it is one byte too long for `out`.
  const int64_t plan[] = {0, shift, s.h, s.w, 3, s.new_h, s.new_w, interpolation,
                          0, shift, s.h, s.w, 4, s.new_h, s.new_w, interpolation};
  ResizeParams p{};
  p.storages = {{bytes}, {static_cast<int64_t>(source.size())}, 1};
  p.plan = plan;
  p.images = 2;
  p.channels = kChannels;
  p.out = reinterpret_cast<uint8_t*>(out.data());
  p.out_bytes = size + 3;
  ASSERT_EQ(launch_image_resize(p, nullptr), cudaSuccess);
  ASSERT_EQ(std::memcmp(out.data() + 3, want.data(), want.size()), 0);
  ASSERT_EQ(out.data()[2], 0x5a);

  const int64_t top = random.below(20) - 5, left = random.below(20) - 5;
  const int64_t letterbox[] = {0, shift, s.h, s.w, pitch, s.new_h, s.new_w, top, left, interpolation};
  const int height = static_cast<int>(1 + random.below(50)), width = static_cast<int>(1 + random.below(90));
  Memory batch(static_cast<size_t>(height) * width * kChannels);
  LetterboxParams l{p.storages, letterbox, false, {}};
  l.out = {batch.data(), PixelType::kUint8, false, true, 1, kChannels, height, width};
  ASSERT_EQ(launch_image_letterbox(l, nullptr), cudaSuccess);
  for (int c = 0; c < kChannels; ++c) {
    for (int64_t y = 0; y < height; ++y) {
      for (int64_t x = 0; x < width; ++x) {
        const bool inside = y >= top && x >= left && y < top + s.new_h && x < left + s.new_w;
        const int level =
            inside ? want[((y - top) * s.new_w + x - left) * kChannels + kChannels - 1 - c] : int{kBorder};
        ASSERT_EQ(static_cast<uint8_t>(batch.data()[(c * height + y) * width + x]), level);
      }
    }
  }
}

TEST(ImageKernels, ResizeAndLetterboxEqualRows) {
  for (uint64_t seed = 0; seed < rounds(60) && !HasFailure(); ++seed) {
    check_resize<3>(seed);
    check_resize<1>(seed + 1000);
  }
}

}  // namespace
}  // namespace torch_fastdet::core
