// Test which JPEGs are packed or refused, and compare whole images and rectangles with nested loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/jpeg/jpeg_loops.h"
#include "core/jpeg/jpeg_pack.h"
#include "core/jpeg/jpeg_plan.h"
#include "jpeg_files.h"

namespace torch_fastdet::core {
namespace {

using Bytes = std::vector<uint8_t>;

std::pair<std::string, Bytes> pack(const Bytes& file, int segment_bits = kJpegMaxSegmentBits) {
  // The copy has exactly as much memory as the file.
  const std::vector<uint8_t> exact(file);
  Bytes packed;
  const char* reason = JpegPacker(segment_bits).pack(exact.data(), static_cast<int64_t>(exact.size()), packed);
  return {reason ? reason : "", packed};
}

int any_segment(uint64_t seed) {
  return static_cast<int>(seed % (kJpegMaxSegmentBits + 1));
}

Bytes decode(const Bytes& packed, const JpegRect& rect, int64_t pitch) {
  Bytes out(static_cast<size_t>(rect.height) * pitch, 0x5a);
  JpegDecoder().decode(packed.data(), rect, out.data(), pitch);
  return out;
}

TEST(Jpeg, DecodesWholeImagesAndRectanglesOfAnyLayout) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    RandomJpeg jpeg(seed);
    const auto [reason, packed] = pack(jpeg.bytes, any_segment(seed));
    ASSERT_EQ(reason, "") << seed;
    const auto& h = *reinterpret_cast<const JpegHeader*>(packed.data());
    ASSERT_EQ(jpeg_shown_width(h), jpeg.shown_width);
    ASSERT_EQ(jpeg_shown_height(h), jpeg.shown_height);
    ASSERT_EQ(decode(packed, {0, 0, jpeg.shown_width, jpeg.shown_height}, jpeg.shown_width * 3), jpeg.pixels) << seed;
    for (int i = 0; i < 3; ++i) {
      const int x = jpeg.below(jpeg.shown_width), y = jpeg.below(jpeg.shown_height);
      const JpegRect rect{x, y, 1 + jpeg.below(jpeg.shown_width - x), 1 + jpeg.below(jpeg.shown_height - y)};
      const int pitch = rect.width * 3 + jpeg.below(5);
      const Bytes part = decode(packed, rect, pitch);
      for (int row = 0; row < rect.height; ++row) {
        for (int j = 0; j < pitch; ++j) {
          const int at = ((y + row) * jpeg.shown_width + x) * 3 + j;
          const int wanted = j < rect.width * 3 ? jpeg.pixels[static_cast<size_t>(at)] : 0x5a;
          ASSERT_EQ(part[static_cast<size_t>(row * pitch + j)], wanted) << seed << " " << row << " " << j;
        }
      }
    }
  }
}

TEST(Jpeg, TheTransformForAvx2IsTheOneForAnyProcessor) {
  if (!has_avx2()) GTEST_SKIP() << "no AVX2";
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    JpegCoefficients in{};
    const int most = i % 3 == 0 ? 65536 : i % 3 == 1 ? 2048 : 64, count = 1 + static_cast<int>(random() % 64);
    for (int j = 0; j < count; ++j) {
      const auto at = random() % (i % 5 == 0 ? 8 : 64);  // the first row alone, or anywhere
      in.x[at] = static_cast<int16_t>(static_cast<int>(random() % most) - most / 2);
      in.last = std::max(in.last, at ? 1 : 0);
    }
    Bytes any(8 * 11, 0x5a), avx2(any);
    jpeg_idct_block<false>(in, any.data(), 11);
    jpeg_idct_block<true>(in, avx2.data(), 11);
    ASSERT_EQ(any, avx2) << i;
  }
}

TEST(Jpeg, SegmentsCoverEveryMcuOnce) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    RandomJpeg jpeg(seed, 120);
    const Bytes packed = pack(jpeg.bytes, any_segment(seed)).second;
    const auto& h = *reinterpret_cast<const JpegHeader*>(packed.data());
    uint32_t next = 0;
    for (uint32_t segment = 0; segment < h.segments; ++segment) {
      const JpegSpan span = jpeg_segment_span(h, segment);
      ASSERT_EQ(span.begin, next);
      ASSERT_LE(span.end - span.begin, 1u << any_segment(seed));
      for (uint32_t mcu = span.begin; mcu < span.end; ++mcu) ASSERT_EQ(jpeg_segment_of(h, mcu), segment);
      next = span.end;
    }
    ASSERT_EQ(next, jpeg_mcus(h));
  }
}

TEST(Jpeg, ThePlanCountsTheSegmentsOfARectangle) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    RandomJpeg jpeg(seed, 200);
    const Bytes packed = pack(jpeg.bytes, any_segment(seed)).second;
    const auto& h = *reinterpret_cast<const JpegHeader*>(packed.data());
    const int x = jpeg.below(jpeg.shown_width), y = jpeg.below(jpeg.shown_height);
    const JpegRect rect{x, y, 1 + jpeg.below(jpeg.shown_width - x), 1 + jpeg.below(jpeg.shown_height - y)};
    int64_t plan[kJpegColumns] = {0, rect.x, rect.y, rect.width, rect.height, 0, rect.width * 3};
    const JpegTotals totals = complete_jpeg_plan(plan, 1, [&](int64_t) -> const JpegHeader& { return h; });
    const JpegRegion region = jpeg_region(h, rect);
    int64_t wanted = 0;
    for (uint32_t segment = 0; segment < h.segments; ++segment) {
      const JpegSpan span = jpeg_segment_span(h, segment);
      bool seen = false;
      for (uint32_t mcu = span.begin; mcu < span.end; ++mcu) {
        const int column = static_cast<int>(mcu % h.mcu_columns), row = static_cast<int>(mcu / h.mcu_columns);
        seen =
            seen || (column >= region.mcu_x0 && column < region.mcu_x1 && row >= region.mcu_y0 && row < region.mcu_y1);
      }
      wanted += seen;
    }
    ASSERT_EQ(totals.groups, ceil_div(wanted, kJpegGroup)) << seed;
    ASSERT_EQ(plan[kJpegGroups], totals.groups);
    ASSERT_EQ(plan[kJpegTiles], totals.tiles);
  }
}

TEST(Jpeg, RefusesEveryPrefixOfAFileAndReadsNothingBehindIt) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    RandomJpeg jpeg(seed, 24);
    int taken = 0;
    for (size_t bytes = 0; bytes < jpeg.bytes.size(); ++bytes) {
      taken += pack(Bytes(jpeg.bytes.begin(), jpeg.bytes.begin() + static_cast<int64_t>(bytes))).first.empty();
    }
    EXPECT_LE(taken, 10) << seed;  // where only EOI, or what lies behind it, is missing
  }
}

TEST(Jpeg, TakesOrRefusesFilesWithChangedBytesAndThenDecodes) {
  std::mt19937_64 random(1);
  int taken = 0, refused = 0;
  for (uint64_t i = 0; i < 3000; ++i) {
    RandomJpeg jpeg(i % 100, 40);
    for (uint64_t changes = 1 + random() % 3; changes; --changes) {
      jpeg.bytes[random() % jpeg.bytes.size()] = static_cast<uint8_t>(random());
    }
    const auto [reason, packed] = pack(jpeg.bytes);
    if (!reason.empty()) {
      ++refused;
      continue;
    }
    ++taken;
    const auto& h = *reinterpret_cast<const JpegHeader*>(packed.data());
    decode(packed, {0, 0, jpeg_shown_width(h), jpeg_shown_height(h)}, jpeg_shown_width(h) * 3);
  }
  EXPECT_GT(taken, 300);
  EXPECT_GT(refused, 300);
}

TEST(Jpeg, ADamagedPackedJpegIsSeenOrDecodedWithoutReadingBesideIt) {
  std::mt19937_64 random(2);
  int sound = 0;
  for (uint64_t i = 0; i < 3000; ++i) {
    Bytes packed = pack(RandomJpeg(i % 100, 40).bytes, any_segment(i)).second;
    const size_t at = random() % packed.size();
    packed[at] = static_cast<uint8_t>(random());
    const auto bytes = static_cast<int64_t>(packed.size());
    const auto& h = *reinterpret_cast<const JpegHeader*>(packed.data());
    if (!jpeg_is_sound(h, bytes)) continue;
    ++sound;
    decode(packed, {0, 0, jpeg_shown_width(h), jpeg_shown_height(h)}, jpeg_shown_width(h) * 3);
  }
  EXPECT_GT(sound, 1000);
}

TEST(Jpeg, AScanThatSeveralThreadsReadGivesTheSame) {
  int64_t helped = 0, mcus = 0, refused = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    RandomJpeg jpeg(seed, 120);
    Bytes file = jpeg.bytes;
    if (seed % 4 == 0) file[file.size() - 3 - static_cast<size_t>(jpeg.below(40)) % file.size()] ^= 0x55;
    const auto [reason, packed] = pack(file, any_segment(seed));
    refused += !reason.empty();
    std::vector<std::thread> threads;
    const auto in_a_thread = [&](std::function<void()> task) { threads.emplace_back(std::move(task)); };
    const auto never = [](const std::function<void()>&) {};
    const JpegPacker::Ask asks[] = {at_once, in_a_thread, never};
    for (const JpegPacker::Ask& ask : asks) {
      JpegPacker packer(any_segment(seed), 3, ask, 32);
      Bytes again;
      const char* said = packer.pack(file.data(), static_cast<int64_t>(file.size()), again);
      ASSERT_EQ(reason, said ? said : "") << seed;
      ASSERT_EQ(packed, again) << seed;
      if (said || jpeg.interval || &ask != asks) continue;
      helped += packer.helped();
      mcus += jpeg_mcus(*reinterpret_cast<const JpegHeader*>(packed.data()));
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_GT(refused, 10);
  EXPECT_GT(helped, mcus / 4);
}

TEST(Jpeg, AHeaderThatPromisesTooMuchAllocatesNothing) {
  RandomJpeg jpeg(3, 24);
  for (size_t i = 2; i + 9 < jpeg.bytes.size(); ++i) {
    if (jpeg.bytes[i] == 0xff && (jpeg.bytes[i + 1] == 0xc0 || jpeg.bytes[i + 1] == 0xc1)) {
      for (const int side : {65500, 32000, 4000}) {
        for (const size_t at : {i + 5, i + 7}) {
          jpeg.bytes[at] = static_cast<uint8_t>(side >> 8), jpeg.bytes[at + 1] = static_cast<uint8_t>(side);
        }
        Bytes packed;
        const char* reason = JpegPacker().pack(jpeg.bytes.data(), static_cast<int64_t>(jpeg.bytes.size()), packed);
        ASSERT_NE(reason, nullptr);
        EXPECT_EQ(std::string(reason), side == 65500 ? "too large" : "cut short");
        EXPECT_LT(packed.capacity(), 1u << 20);
      }
      return;
    }
  }
  FAIL();
}

}  // namespace
}  // namespace torch_fastdet::core
