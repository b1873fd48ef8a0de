// fuzz_jpeg COUNT [SEED] runs COUNT damaged JPEG files and damaged packed JPEGs through the parser, the index pass and
// the decoder. Built with AddressSanitizer (make fuzz), it ends at the first forbidden access. tests/ops/test_jpeg.py
// compares the pixels with OpenCV.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "core/jpeg/jpeg_loops.h"
#include "core/jpeg/jpeg_pack.h"
#include "jpeg_files.h"

using namespace torch_fastdet::core;

namespace {

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : random_(seed) {}

  void damage(std::vector<uint8_t>& bytes) {
    const int changes = 1 + below(4);
    for (int i = 0; i < changes && !bytes.empty(); ++i) {
      const auto at = bytes.begin() + below(static_cast<int>(bytes.size()));
      switch (below(8)) {
        case 0:
          bytes.erase(at, bytes.end());
          break;
        case 1:
          bytes.insert(at, static_cast<uint8_t>(random_()));
          break;
        case 2:
          bytes.erase(at);
          break;
        case 3:
          *at = static_cast<uint8_t>(0xff);
          break;
        default:
          *at = static_cast<uint8_t>(random_());
      }
    }
  }

  // Decode the whole image and a rectangle if the packed JPEG is sound and its image no larger than 4 megapixels.
  void decode(const std::vector<uint8_t>& packed) {
    if (packed.size() < kJpegHeaderBytes) return;
    const auto& h = *reinterpret_cast<const JpegHeader*>(packed.data());
    if (!jpeg_is_sound(h, static_cast<int64_t>(packed.size()))) return;
    const int width = jpeg_shown_width(h), height = jpeg_shown_height(h);
    if (int64_t{width} * height > 1 << 22) return;
    ++decoded;
    const int x = below(width), y = below(height);
    for (const JpegRect& rect :
         {JpegRect{0, 0, width, height}, JpegRect{x, y, 1 + below(width - x), 1 + below(height - y)}}) {
      std::vector<uint8_t> out(static_cast<size_t>(rect.width) * rect.height * 3);
      decoder_.decode(packed.data(), rect, out.data(), rect.width * 3);
    }
  }

  void run(uint64_t seed) {
    std::vector<uint8_t> file = RandomJpeg(seed % 5000, 40).bytes, packed;
    const int segment_bits = below(kJpegMaxSegmentBits + 1);
    JpegPacker& packer = packers_[segment_bits];
    if (below(4) == 0) {
      packer.pack(file.data(), static_cast<int64_t>(file.size()), packed);
      damage(packed);
    } else {
      damage(file);
      const std::vector<uint8_t> exact(file);  // no byte behind it may be read
      const char* reason = packer.pack(exact.data(), static_cast<int64_t>(exact.size()), packed);
      refused += reason != nullptr;
      std::vector<uint8_t> again;
      JpegPacker with_help(segment_bits, 1, at_once, 16);
      const bool same = with_help.pack(exact.data(), static_cast<int64_t>(exact.size()), again) == reason;
      if (!same || again != packed) std::abort();
    }
    decode(packed);
  }

  int64_t decoded = 0, refused = 0;

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }

  std::mt19937_64 random_;
  JpegPacker packers_[3]{JpegPacker(0), JpegPacker(1), JpegPacker(2)};
  JpegDecoder decoder_;
};

}  // namespace

int main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  Fuzzer fuzzer(seed);
  for (uint64_t i = 0; i < count; ++i) fuzzer.run(seed + i);
  std::printf("%llu damaged: %lld refused, %lld decoded\n", static_cast<unsigned long long>(count),
              static_cast<long long>(fuzzer.refused), static_cast<long long>(fuzzer.decoded));
}
