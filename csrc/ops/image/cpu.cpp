// The image operators on the CPU: threads over bands of rows, further copies of the inner loops for AVX2 and AVX-512.
#include <ATen/Parallel.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/image/augment_rows.h"
#include "core/image/resize_rows.h"
#include "ops/image/check_tables.h"
#include "ops/image/run.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define TORCH_FASTDET_HAS_IMAGE_AVX2 1
#include "core/image/augment_avx512.h"
#include "core/image/resize_avx2.h"
#endif

namespace torch_fastdet::image_cpu {
namespace {

// Rows that a thread takes at once at least: enough to make up for what is worked out once a picture.
constexpr int64_t kBand = 64;

core::RowKernels row_kernels() {
#ifdef TORCH_FASTDET_HAS_IMAGE_AVX2
  if (core::has_image_avx512()) return core::row_kernels_avx512();
  if (core::has_image_avx2()) return core::row_kernels_avx2();
#endif
  return core::plain_row_kernels();
}

core::ResizeKernels resize_kernels() {
#ifdef TORCH_FASTDET_HAS_IMAGE_AVX2
  if (core::has_image_avx2()) return core::resize_kernels_avx2();
#endif
  return core::plain_resize_kernels();
}

// The batch's element for each level.
class LevelTable {
 public:
  explicit LevelTable(core::PixelType type) : type_(type) {
    for (int level = 0; level < 256; ++level) {
      single_[level] = core::normalised(level, /*reciprocal=*/false);
      half_[level] = c10::Half(single_[level]).x;
    }
  }
  const void* data() const {
    return type_ == core::PixelType::kFloat32 ? static_cast<const void*>(single_.data()) : half_.data();
  }

 private:
  core::PixelType type_;
  std::array<float, 256> single_;
  std::array<uint16_t, 256> half_;
};

// Calls f(picture, first row, last row) for bands of the pictures' rows, in parallel: whole pictures where there are
// enough of them.
template <typename F>
void for_bands(int64_t pictures, int64_t height, const F& f) {
  const int64_t rows = pictures >= 4 * at::get_num_threads() || at::get_num_threads() == 1 ? height : kBand;
  const int64_t bands = (height + rows - 1) / rows;
  at::parallel_for(0, pictures * bands, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % bands * rows;
      f(i / bands, static_cast<int>(first), static_cast<int>(std::min(height, first + rows)));
    }
  });
}

template <int kChannels>
void augment(const core::AugmentParams& p) {
  const LevelTable levels(p.out.type);
  const core::RowKernels kernels = row_kernels();
  const core::RowStore store{p.out, levels.data(), kernels};
  for_bands(p.out.batch, p.out.height,
            [&](int64_t n, int begin, int end) { core::AugmentPicture<kChannels>(p, n, store).run(begin, end); });
}

template <int kChannels>
void letterbox(const core::LetterboxParams& p) {
  const LevelTable levels(p.out.type);
  const core::RowKernels kernels = row_kernels();
  const core::RowStore store{p.out, levels.data(), kernels};
  for_bands(p.out.batch, p.out.height, [&](int64_t n, int begin, int end) {
    const core::LetterboxJob job = core::read_letterbox_job(p, n);
    const int width = p.out.width;
    std::vector<uint32_t> words(static_cast<size_t>(width));
    std::vector<uint8_t> bytes(static_cast<size_t>(job.resize.x.target) * kChannels);
    core::ResizeRows<kChannels> resize(job.source, job.pitch, job.resize, resize_kernels());
    const int left = std::max(job.left, 0), right = std::min<int64_t>(width, int64_t{job.left} + job.resize.x.target);
    for (int y = begin; y < end; ++y) {
      std::fill(words.begin(), words.end(), core::kBorderWord[kChannels == 3]);
      if (y >= job.top && y - job.top < job.resize.y.target && left < right) {
        resize.row(y - job.top, bytes.data());
        const uint8_t* from = bytes.data() + static_cast<int64_t>(left - job.left) * kChannels;
        core::expand_row<kChannels>(kernels, from, words.data() + left, right - left);
      }
      store.store<kChannels>(n, y, words.data(), p.keep_bgr);
    }
  });
}

template <int kChannels>
void resize_bands(const core::ResizeParams& p) {
  struct Band {
    int64_t picture;
    int begin, end;
  };
  std::vector<Band> bands;
  for (int64_t n = 0; n < p.pictures; ++n) {
    const int64_t height = p.plan[n * core::kResizeColumns + 5];
    for (int64_t y = 0; y < height; y += kBand) {
      bands.push_back({n, static_cast<int>(y), static_cast<int>(std::min(height, y + kBand))});
    }
  }
  at::parallel_for(0, static_cast<int64_t>(bands.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Band& band = bands[static_cast<size_t>(i)];
      const core::ResizeJob job = core::read_resize_job(p, band.picture);
      core::ResizeRows<kChannels> resize(job.source, job.pitch, job.resize, resize_kernels());
      const int64_t row_bytes = static_cast<int64_t>(job.resize.x.target) * kChannels;
      for (int y = band.begin; y < band.end; ++y) resize.row(y, job.out + y * row_bytes);
    }
  });
}

struct Cpu : OnDevice {
  static void run(const core::AugmentParams& p, const char* op) {
    check_rows(p, op);
    if (p.out.height == 0 || p.out.width == 0) return;
    p.out.channels == 1 ? augment<1>(p) : augment<3>(p);
  }
  static void run(const core::LetterboxParams& p, const char* op) {
    check_rows(p, op);
    if (p.out.height == 0 || p.out.width == 0) return;
    p.out.channels == 1 ? letterbox<1>(p) : letterbox<3>(p);
  }
  static void run(const core::ResizeParams& p, const char* op) {
    check_rows(p, op);
    p.channels == 1 ? resize_bands<1>(p) : resize_bands<3>(p);
  }
};

// Bytes that a thread copies at least: 3 ms. To share less would wake all of PyTorch's threads, which then spin for a
// while, beside a loop that wants the cores.
constexpr int64_t kGatherGrain = int64_t{32} << 20;

void image_gather_(at::Tensor& out, at::TensorList storages, const at::Tensor& pieces) {
  constexpr const char* kOp = "image_gather_";
  check_storages(storages, kOp);
  check_dense_1d(out, storages[0], kOp, "out");
  check_table(pieces, core::kPieceColumns, at::kLong, storages[0], kOp, "pieces");
  const core::Storages from = core_storages(storages);
  const auto* rows = pieces.const_data_ptr<int64_t>();
  const int64_t count = pieces.size(0);
  std::vector<int64_t> ends(static_cast<size_t>(count));
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    check_piece(from, rows + i * core::kPieceColumns, out.numel(), kOp, i);
    ends[static_cast<size_t>(i)] = total += rows[i * core::kPieceColumns + 2];
  }
  auto* const to = out.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, total, kGatherGrain, [&](int64_t begin, int64_t end) {
    auto i = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const int64_t* row = rows + i * core::kPieceColumns;
      const int64_t stop = std::min(end, ends[static_cast<size_t>(i)]);
      const int64_t skipped = row[2] - (ends[static_cast<size_t>(i)] - begin);
      std::memcpy(to + row[3] + skipped, from.data[row[0]] + row[1] + skipped, static_cast<size_t>(stop - begin));
      begin = stop, ++i;
    }
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_image<Cpu>(m);
  m.impl("image_gather_", TORCH_FN(image_gather_));
}

}  // namespace torch_fastdet::image_cpu
