// Run the CPU's loops over batches of images. The caller's parallel_for distributes bands of rows.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/common/instruction_set.h"
#include "core/image/augment_rows.h"
#include "core/image/resize_rows.h"

#ifdef TORCH_FASTDET_AVX2
#include "core/image/augment_avx2.h"
#include "core/image/resize_avx2.h"
#endif

namespace torch_fastdet::core {

// A thread takes at least this many rows at a time, to outweigh the work that it does once per image.
constexpr int64_t kBand = 64;

inline RowKernels row_kernels() {
#ifdef TORCH_FASTDET_AVX2
  if (has_avx2()) return row_kernels_avx2();
#endif
  return plain_row_kernels();
}

inline ResizeKernels resize_kernels() {
#ifdef TORCH_FASTDET_AVX2
  if (has_avx2()) return resize_kernels_avx2();
#endif
  return plain_resize_kernels();
}

// Hold the batch's element for each level. Half is the host's float16.
template <typename Half>
class LevelTable {
 public:
  explicit LevelTable(PixelType type) : type_(type) {
    for (int level = 0; level < 256; ++level) {
      single_[level] = normalised(level, /*reciprocal=*/false);
      half_[level] = static_cast<Half>(single_[level]);
    }
  }
  const void* data() const {
    return type_ == PixelType::kFloat32 ? static_cast<const void*>(single_.data()) : half_.data();
  }

 private:
  PixelType type_;
  std::array<float, 256> single_;
  std::array<Half, 256> half_;
};

// Call f(image, first row, last row) in parallel for bands of rows, or for whole images if there are enough of them.
template <typename ParallelFor, typename F>
void for_bands(int64_t images, int64_t height, int threads, const ParallelFor& parallel_for, const F& f) {
  const int64_t rows = images >= int64_t{4} * threads || threads == 1 ? height : kBand;
  const int64_t bands = (height + rows - 1) / rows;
  parallel_for(0, images * bands, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % bands * rows;
      f(i / bands, static_cast<int>(first), static_cast<int>(std::min(height, first + rows)));
    }
  });
}

template <typename Half, int kChannels, typename ParallelFor>
void augment_batch(const AugmentParams& p, int threads, const ParallelFor& parallel_for) {
  const LevelTable<Half> levels(p.out.type);
  const RowKernels kernels = row_kernels();
  const RowStore store{p.out, levels.data(), kernels};
  for_bands(p.out.batch, p.out.height, threads, parallel_for,
            [&](int64_t n, int begin, int end) { AugmentImage<kChannels>(p, n, store).run(begin, end); });
}

template <typename Half, int kChannels, typename ParallelFor>
void letterbox_batch(const LetterboxParams& p, int threads, const ParallelFor& parallel_for) {
  const LevelTable<Half> levels(p.out.type);
  const RowKernels kernels = row_kernels();
  const RowStore store{p.out, levels.data(), kernels};
  for_bands(p.out.batch, p.out.height, threads, parallel_for, [&](int64_t n, int begin, int end) {
    const LetterboxJob job = read_letterbox_job(p, n);
    const int width = p.out.width;
    std::vector<uint32_t> words(static_cast<size_t>(width));
    std::vector<uint8_t> bytes(static_cast<size_t>(job.resize.x.target) * kChannels);
    ResizeRows<kChannels> resize(job.source, job.pitch, job.resize, resize_kernels());
    const int left = std::max(job.left, 0), right = std::min<int64_t>(width, int64_t{job.left} + job.resize.x.target);
    for (int y = begin; y < end; ++y) {
      std::fill(words.begin(), words.end(), kBorderWord[kChannels == 3]);
      if (y >= job.top && y - job.top < job.resize.y.target && left < right) {
        resize.row(y - job.top, bytes.data());
        const uint8_t* from = bytes.data() + static_cast<int64_t>(left - job.left) * kChannels;
        expand_row<kChannels>(kernels, from, words.data() + left, right - left);
      }
      store.store<kChannels>(n, y, words.data(), p.keep_bgr);
    }
  });
}

template <int kChannels, typename ParallelFor>
void resize_images(const ResizeParams& p, const ParallelFor& parallel_for) {
  struct Band {
    int64_t image;
    int begin, end;
  };
  std::vector<Band> bands;
  for (int64_t n = 0; n < p.images; ++n) {
    const int64_t height = p.plan[n * kResizeColumns + 5];
    for (int64_t y = 0; y < height; y += kBand) {
      bands.push_back({n, static_cast<int>(y), static_cast<int>(std::min(height, y + kBand))});
    }
  }
  parallel_for(0, static_cast<int64_t>(bands.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Band& band = bands[static_cast<size_t>(i)];
      const ResizeJob job = read_resize_job(p, band.image);
      ResizeRows<kChannels> resize(job.source, job.pitch, job.resize, resize_kernels());
      const int64_t row_bytes = static_cast<int64_t>(job.resize.x.target) * kChannels;
      for (int y = band.begin; y < band.end; ++y) resize.row(y, job.out + y * row_bytes);
    }
  });
}

// Copy pieces of storages, rows of kPieceColumns, to their places in `out`. A thread takes at least `grain` bytes.
template <typename ParallelFor>
void gather_pieces(const Storages& storages, const int64_t* rows, int64_t count, uint8_t* out, int64_t grain,
                   const ParallelFor& parallel_for) {
  std::vector<int64_t> ends(static_cast<size_t>(count));
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) ends[static_cast<size_t>(i)] = total += rows[i * kPieceColumns + 2];
  parallel_for(0, total, grain, [&](int64_t begin, int64_t end) {
    auto i = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const int64_t* row = rows + i * kPieceColumns;
      const int64_t stop = std::min(end, ends[static_cast<size_t>(i)]);
      const int64_t skipped = row[2] - (ends[static_cast<size_t>(i)] - begin);
      std::memcpy(out + row[3] + skipped, storages.data[row[0]] + row[1] + skipped, static_cast<size_t>(stop - begin));
      begin = stop, ++i;
    }
  });
}

}  // namespace torch_fastdet::core
