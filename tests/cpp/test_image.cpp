// Compare the image operators' formulas with what they stand for; tests/ops/test_image.py compares them with OpenCV.
#include <gtest/gtest.h>

#include <cmath>

#include "core/image/image_loops.h"
#include "kernels/backwards.h"
#include "kernels/half.h"

namespace torch_fastdet::core {
namespace {

#if defined(__x86_64__)
// Operators use only a machine's best vector code; compare each with the plain loop, over colors, tables and odd
// lengths.
TEST(ImageColors, VectorCodeEqualsPlain) {
  std::vector<uint8_t> tables(768);
  uint32_t state = 1;
  const auto random = [&] { return state = state * 1664525u + 1013904223u; };
  for (uint8_t& level : tables) level = static_cast<uint8_t>(random() >> 24);
  ColorTables colors;
  for (int i = 0; i < 256; ++i) fill_color_tables(colors, tables.data(), i);
  std::vector<RowKernels> kernels;
  if (has_avx2()) kernels.push_back(row_kernels_avx2());
  for (int count = 0; count < 70; ++count) {
    std::vector<uint32_t> row(static_cast<size_t>(count) + 16);
    for (uint32_t& word : row) word = random() >> 8;
    for (int i = 0; i < count; i += 5) row[i] = (row[i] & 255) * 0x010101;  // grey
    for (const bool round : {false, true}) {
      std::vector<uint32_t> want = row;
      recolor_span(colors, want.data(), 0, count, round);
      std::vector<uint8_t> plane(count), want_plane(count);
      for (const RowKernels& k : kernels) {
        std::vector<uint32_t> got = row;
        k.recolor(colors, got.data(), 0, count, round);
        ASSERT_EQ(got, want);
        for (const int shift : {0, 8, 16}) {
          k.plane(row.data(), count, shift, plane.data());
          torch_fastdet::core::plane(row.data(), count, shift, want_plane.data());
          ASSERT_EQ(plane, want_plane);
        }
      }
    }
    std::vector<uint8_t> bytes(3 * count);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random() >> 24);
    std::vector<uint32_t> want(count), got(count);
    expand(bytes.data(), want.data(), count);
    for (const RowKernels& k : kernels) {
      k.expand3(bytes.data(), got.data(), count);
      ASSERT_EQ(got, want);
    }
  }
}
#endif

std::vector<RowKernels> all_row_kernels() {
  std::vector<RowKernels> kernels{plain_row_kernels()};
#if defined(__x86_64__)
  if (has_avx2()) kernels.push_back(row_kernels_avx2());
#endif
  return kernels;
}

Storages whole_storage(const std::vector<uint8_t>& bytes) {
  return {{bytes.data()}, {static_cast<int64_t>(bytes.size())}, 1};
}

// Return one layer of one placement; the caller sets where it goes.
AugmentParams one_layer(const std::vector<uint8_t>& bytes, const int64_t* placement, const int64_t* layer,
                        const double* matrix, const int64_t* images) {
  AugmentParams p{};
  p.storages = whole_storage(bytes);
  p.placements = placement;
  p.layers = layer;
  p.matrices = matrix;
  p.images = images;
  p.placement_rows = p.layer_rows = 1;
  return p;
}

// Return what a warped layer shows at (x, y), from the formulas alone.
Pixel<3> warped_pixel(const AugmentParams& p, const Layer& layer, int x, int y) {
  const double* m = layer.map.m;
  if (p.arithmetic == WarpArithmetic::kFloat) {
    return sample_point<3>(layer, float_line(layer.map, layer.warp, y).at(x));
  }
  if (layer.warp == WarpKind::kPerspective) {
    return sample_point<3>(layer, perspective_point(layer.map, x, y, perspective_block(p.out.width, p.out.height)));
  }
  return sample_point<3>(layer, WarpPoint{affine_coordinate(affine_column(m[0], x), affine_row(m[1], m[2], y)),
                                          affine_coordinate(affine_column(m[3], x), affine_row(m[4], m[5], y))});
}

// Rows of plain and of vector code, which process many pixels at once, equal one pixel after another. The warped mosaic
// has exactly as much memory as its images take; some images overlap, and some horizons cross the output.
TEST(ImageWarp, RowsEqualPixels) {
  constexpr int kSide = 37;
  constexpr int kSizes[][2] = {{53, 41}, {150, 20}, {160, 7}, {5, 30}, {64, 16}};
  uint32_t state = 7;
  const auto random = [&] { return static_cast<double>((state = state * 1664525u + 1013904223u) >> 8) / (1 << 24); };
  std::vector<uint8_t> bytes(4 * kSide * kSide * 3);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(256 * random());
  std::vector<uint8_t> masks(4 * kSide * kSide);
  for (uint8_t& mask : masks) mask = random() < 0.3;
  for (int round = 0; round < 120; ++round) {
    const int width = kSizes[round % 5][0], height = kSizes[round % 5][1];
    const int64_t x = static_cast<int64_t>(60 * random()), y = static_cast<int64_t>(60 * random());
    const int64_t apart = round % 7 ? kSide : kSide / 2;
    std::vector<int64_t> placements;
    for (int64_t i = 0; i < 4; ++i) {
      placements.insert(placements.end(), {0, i * kSide * kSide * 3, kSide, kSide, 0, 0, x - (i % 2 ? 0 : apart),
                                           y - (i / 2 ? 0 : apart), kSide, kSide});
    }
    const int64_t layers[] = {0, 4, 2 * kSide, 2 * kSide, round % 3 ? 2 : 1, round % 4 ? -1 : 0};
    double matrix[] = {1, 0, -5, 0, 1, -9, 0, 0, 1};
    for (int i = 0; i < 6; ++i) matrix[i] += (i % 3 == 2 ? 30 : 0.8) * (random() - 0.5);
    for (int i = 6; i < 8; ++i) matrix[i] = (round % 8 ? 0.01 : 0.2) * (random() - 0.5);
    const int64_t images[] = {0, -1, kKeepBgr, -1};
    std::vector<uint8_t> out(width * height * 3);
    AugmentParams p = one_layer(bytes, placements.data(), layers, matrix, images);
    p.masks = masks.data();
    p.placement_rows = 4;
    p.mask_bytes = static_cast<int64_t>(masks.size());
    p.out = {out.data(), PixelType::kUint8, /*channels_last=*/true, false, 1, 3, height, width};
    Layer layer;
    read_layer_head(p, 0, layer);
    for (int i = 0; i < 4; ++i) layer.patch[i] = read_layer_patch(p, 0, layer, i);
    layer.map = read_layer_map(p, 0, layer);
    for (const WarpArithmetic arithmetic : {WarpArithmetic::kFixed, WarpArithmetic::kFloat}) {
      p.arithmetic = arithmetic;
      for (const RowKernels& kernels : all_row_kernels()) {
        AugmentImage<3>(p, 0, RowStore{p.out, nullptr, kernels}).run(0, height);
        for (int i = 0; i < width * height; ++i) {
          const Pixel<3> want = warped_pixel(p, layer, i % width, i / width);
          for (int c = 0; c < 3; ++c) ASSERT_EQ(out[3 * i + c], want.v[c]) << "round " << round << ", pixel " << i;
        }
      }
    }
  }
}

// The maps' points do not fit an int or are NaN: w is 0 in a column or everywhere, or factors overflow.
TEST(ImageWarp, RowsOfPointsBeyondInts) {
  const std::vector<uint8_t> bytes(20 * 20 * 3, 9);
  const int64_t placement[] = {0, 0, 20, 20, 0, 0, 3, 3, 20, 20}, layers[] = {0, 1, 30, 30, 2, -1};
  const int64_t images[] = {0, -1, kKeepBgr, -1};
  const double matrices[][9] = {{1, 0, 0, 0, 1, 0, 1. / 8, 0, 1},  // the inverse's w is 0 in column 8
                                {1, 0, 0, 0, 1, 0, 1, 0, 0},
                                {1e-300, 0, 0, 0, 1e-300, 0, 0, 0, 1},
                                {1e300, 0, 1e300, 0, 1e300, 1e300, 1e300, 0, 1},
                                {0, 0, 0, 0, 0, 0, 0, 0, 0}};
  for (const auto& matrix : matrices) {
    std::vector<uint8_t> out(40 * 20 * 3);
    AugmentParams p = one_layer(bytes, placement, layers, matrix, images);
    p.out = {out.data(), PixelType::kUint8, /*channels_last=*/true, false, 1, 3, 20, 40};
    Layer layer;
    read_layer_head(p, 0, layer);
    layer.patch[0] = read_layer_patch(p, 0, layer, 0);
    layer.map = read_layer_map(p, 0, layer);
    for (const WarpArithmetic arithmetic : {WarpArithmetic::kFixed, WarpArithmetic::kFloat}) {
      p.arithmetic = arithmetic;
      for (const RowKernels& kernels : all_row_kernels()) {
        AugmentImage<3>(p, 0, RowStore{p.out, nullptr, kernels}).run(0, 20);
        for (int i = 0; i < 40 * 20; ++i) {
          ASSERT_EQ(out[3 * i], warped_pixel(p, layer, i % 40, i / 40).v[0]) << matrix[0] << ", pixel " << i;
        }
      }
    }
  }
}

// Compare rows with one pixel after another, for images in exactly as much memory as they take.
template <int kChannels>
void check_resized_rows(const ResizeKernels& kernels, Interpolation interpolation) {
  uint32_t state = 5;
  const auto below = [&](int n) { return static_cast<int>((state = state * 1664525u + 1013904223u) >> 8) % n; };
  for (int round = 0; round < 300; ++round) {
    const int w = 1 + below(90), h = 1 + below(12), new_w = 1 + below(90), new_h = 1 + below(12);
    std::vector<uint8_t> source(static_cast<size_t>(w) * h * kChannels), out(static_cast<size_t>(new_w) * kChannels);
    for (uint8_t& byte : source) byte = static_cast<uint8_t>(round % 2 ? below(256) : 255);
    const Resize resize = make_resize(w, h, new_w, new_h, interpolation);
    ResizeRows<kChannels> rows(source.data(), int64_t{w} * kChannels, resize, kernels);
    for (int y = 0; y < new_h; ++y) {
      rows.row(y, out.data());
      for (int i = 0; i < new_w * kChannels; ++i) {
        const int want = resized_level(resize, i / kChannels, y, [&](int x, int row) {
          return int{source[static_cast<size_t>((row * w + x) * kChannels + i % kChannels)]};
        });
        ASSERT_EQ(out[static_cast<size_t>(i)], want) << w << "x" << h << " to " << new_w << "x" << new_h << ", " << i;
      }
    }
  }
}

TEST(ImageResize, RowsEqualPixels) {
  std::vector<ResizeKernels> all{plain_resize_kernels()};
#if defined(__x86_64__)
  if (has_avx2()) all.push_back(resize_kernels_avx2());
#endif
  for (const ResizeKernels& kernels : all) {
    for (const Interpolation interpolation : {Interpolation::kLinear, Interpolation::kArea}) {
      check_resized_rows<1>(kernels, interpolation);
      check_resized_rows<3>(kernels, interpolation);
    }
  }
}

// The rectangle reaches beyond the canvas on one side and beyond its image on the other.
TEST(ImageTables, PatchIsCutToWhatExists) {
  const std::vector<uint8_t> bytes(10 * 8 * 3);
  const Storages storages = whole_storage(bytes);
  const int64_t row[] = {0, 0, 10, 8, -2, 3, -1, 4, 100, 100};
  const Patch patch = read_patch(storages, row, 3, 20, 20);
  EXPECT_EQ(patch.x0, 1);
  EXPECT_EQ(patch.x1, 9);
  EXPECT_EQ(patch.y0, 4);
  EXPECT_EQ(patch.y1, 11);
  EXPECT_EQ(patch.at(1, 4, 3), bytes.data() + 3 * 24);
  EXPECT_TRUE(patch.tight);
  const int64_t outside[] = {0, 1, 10, 8, 0, 0, 0, 0, 8, 10};
  EXPECT_EQ(read_patch(storages, outside, 3, 20, 20).data, nullptr);
}

// Batches that threads compute on the CPU, band by band and in any order, equal images computed in one piece.

constexpr int kManyThreads = 8;  // so that few images are cut into bands

std::vector<uint8_t> noise(size_t size) {
  uint32_t state = 7;
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
  return bytes;
}

TEST(ImageLoops, Augment) {
  constexpr int kSide = 40, kHeight = 2 * kBand + 9, kWidth = 30;
  const std::vector<uint8_t> bytes = noise(kSide * kSide * 3);
  const int64_t placements[] = {0, 0, kSide, kSide, 0, 0, 3, 60, kSide, kSide};
  const int64_t layers[] = {0, 1, kHeight, 2 * kWidth, 1, -1}, images[] = {0, -1, 0, -1, 0, -1, kFlipUpDown, -1};
  const double matrix[] = {0.9, 0.1, 2, -0.1, 1.1, 1, 0, 0, 1};
  std::vector<float> whole(size_t{2} * 3 * kHeight * kWidth), bands(whole.size());
  AugmentParams p = one_layer(bytes, placements, layers, matrix, images);
  p.out = {bands.data(), PixelType::kFloat32, /*channels_last=*/false, false, 2, 3, kHeight, kWidth};
  augment_batch<Float16, 3>(p, kManyThreads, backwards);
  p.out.data = whole.data();
  const LevelTable<Float16> levels(p.out.type);
  for (int n = 0; n < 2; ++n)
    AugmentImage<3>(p, n, RowStore{p.out, levels.data(), plain_row_kernels()}).run(0, kHeight);
  EXPECT_EQ(bands, whole);
}

}  // namespace
}  // namespace torch_fastdet::core
