// Compute instance masks on the CPU, one band of rows of one mask at a time. Nothing is computed outside a mask's box.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/common/instruction_set.h"
#include "core/masks/masks_math.h"

#ifdef TORCH_FASTDET_AVX2
#include <immintrin.h>
#endif

namespace torch_fastdet::core {

constexpr int32_t kBandRows = 64;

inline int64_t mask_bands(const MasksParams& p) {
  return p.images * p.count * ceil_div(p.rows.size, kBandRows);
}

struct MaskTables {
  int taps;
  // These hold prototype pixels and their weights, by tap and pixel of the mask.
  std::vector<int32_t> row[kMostTaps], column[kMostTaps];
  std::vector<float> row_weight[kMostTaps], weight[kMostTaps];

  explicit MaskTables(const MasksParams& p) : taps(std::max(tap_count(p.rows), tap_count(p.columns))) {
    fill(p.rows, row, row_weight);
    fill(p.columns, column, weight);
  }

  static void fill(const MaskAxis& axis, std::vector<int32_t> (&source)[kMostTaps],
                   std::vector<float> (&weights)[kMostTaps]) {
    for (int32_t pixel = 0; pixel < axis.size; ++pixel) {
      const MaskTaps of = taps_of(axis, pixel);
      for (int t = 0; t < kMostTaps; ++t) {
        source[t].push_back(std::min(of.first + t, last_pixel(axis)));
        weights[t].push_back(of.weight[t]);
      }
    }
  }
};

// Return the pixels of a mask that depend on pixels `kept` of the prototypes.
inline PixelRange pixels_made_of(const std::vector<int32_t> (&source)[kMostTaps], int taps, PixelRange kept) {
  const auto first_from = [](const std::vector<int32_t>& sorted, int32_t value) {
    return static_cast<int32_t>(std::lower_bound(sorted.begin(), sorted.end(), value) - sorted.begin());
  };
  if (kept.low >= kept.high) return {0, 0};
  return {first_from(source[taps - 1], kept.low), first_from(source[0], kept.high)};
}

// Compute the logits of pixels begin..end-1 of one row of the prototypes, which are float32 with dense rows.
inline void row_logits(const MasksParams& p, const float* protos, const float* coefficients, int32_t begin, int32_t end,
                       float* out) {
  for (int32_t x = begin; x < end; ++x) {
    float sum = 0.f;
    for (int64_t c = 0; c < p.channels; ++c)
      sum = multiply_add(coefficients[c], protos[c * p.proto_stride[1] + x], sum);
    out[x] = sum;
  }
}

#ifdef TORCH_FASTDET_AVX2
TORCH_FASTDET_AVX2 inline void row_logits_avx2(const MasksParams& p, const float* protos, const float* coefficients,
                                               int32_t begin, int32_t end, float* out) {
  int32_t x = begin;
  for (; x + 32 <= end; x += 32) {
    __m256 sum[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    const float* from = protos + x;
    for (int64_t c = 0; c < p.channels; ++c, from += p.proto_stride[1]) {
      const __m256 factor = _mm256_broadcast_ss(coefficients + c);
      for (int k = 0; k < 4; ++k) sum[k] = _mm256_fmadd_ps(factor, _mm256_loadu_ps(from + 8 * k), sum[k]);
    }
    for (int k = 0; k < 4; ++k) _mm256_storeu_ps(out + x + 8 * k, sum[k]);
  }
  for (; x + 8 <= end; x += 8) {
    __m256 sum = _mm256_setzero_ps();
    const float* from = protos + x;
    for (int64_t c = 0; c < p.channels; ++c, from += p.proto_stride[1])
      sum = _mm256_fmadd_ps(_mm256_broadcast_ss(coefficients + c), _mm256_loadu_ps(from), sum);
    _mm256_storeu_ps(out + x, sum);
  }
  row_logits(p, protos, coefficients, x, end, out);
}
#endif

// Set keep[x] to mixed columns > threshold, for pixels begin..end-1 of a mask's row.
template <int kTaps>
void threshold_row(const MaskTables& tables, const float* values, float threshold, int32_t begin, int32_t end,
                   uint8_t* keep) {
  const int32_t *first = tables.column[0].data(), *second = tables.column[1].data(), *third = tables.column[2].data();
  const float *w1 = tables.weight[1].data(), *w2 = tables.weight[2].data();
  for (int32_t x = begin; x < end; ++x) {
    float of[kTaps];
    of[0] = values[first[x]];
    if (kTaps > 1) of[kTaps > 1 ? 1 : 0] = values[second[x]];
    if (kTaps > 2) of[kTaps > 2 ? 2 : 0] = values[third[x]];
    distances<kTaps>(of, threshold);
    keep[x] = distance<kTaps>(of, w1[x], w2[x]) < 0.f;
  }
}

// Cache the last few computed rows of logits at the prototypes' resolution.
class LowRows {
 public:
  LowRows(const MasksParams& p, int64_t image, int64_t index, const MaskBox& box, PixelRange columns)
      : p_(p), box_(box), columns_(columns), values_(static_cast<size_t>(kKept) * p.columns.in) {
    protos_ = static_cast<const float*>(p.protos) + image * p.proto_stride[0];
    coefficients_ = p.coefficients + image * p.coefficient_stride[0] + index * p.coefficient_stride[1];
    std::fill_n(held_, kKept, -1);
  }

  const float* row(int32_t index) {
    float* values = values_.data() + static_cast<size_t>(index % kKept) * p_.columns.in;
    if (held_[index % kKept] == index) return values;
    held_[index % kKept] = index;
    PixelRange wanted = columns_;
    if (p_.crop_first) {
      std::fill(values + columns_.low, values + columns_.high, 0.f);
      if (index < box_.rows.low || index >= box_.rows.high) return values;
      wanted = {std::max(wanted.low, box_.columns.low), std::min(wanted.high, box_.columns.high)};
    }
    const float* from = protos_ + index * p_.proto_stride[2];
#ifdef TORCH_FASTDET_AVX2
    if (has_avx2()) {
      row_logits_avx2(p_, from, coefficients_, wanted.low, wanted.high, values);
    } else
#endif
    {
      row_logits(p_, from, coefficients_, wanted.low, wanted.high, values);
    }
    if (p_.sigmoid) {
      for (int32_t x = wanted.low; x < wanted.high; ++x) values[x] = sigmoid(values[x]);
    }
    return values;
  }

 private:
  static constexpr int kKept = 4;  // more than a pixel's taps, so that none of them evicts another
  const MasksParams& p_;
  const MaskBox& box_;
  PixelRange columns_;
  const float *protos_, *coefficients_;
  std::vector<float> values_;
  int32_t held_[kKept];
};

// Write row `y` of a mask: the 0 or 1 of columns begin..end-1, and 0 elsewhere.
inline void write_mask_row(const MasksParams& p, int64_t mask, int32_t y, const uint8_t* keep, int32_t begin,
                           int32_t end) {
  const int64_t width = p.columns.size, row = mask * p.rows.size + y;
  if (p.format == MaskFormat::kBytes) {
    uint8_t* out = static_cast<uint8_t*>(p.out) + row * width;
    std::memset(out, 0, begin);
    std::memcpy(out + begin, keep + begin, end - begin);
    std::memset(out + end, 0, width - end);
  } else if (p.format == MaskFormat::kFloats) {
    float* out = static_cast<float*>(p.out) + row * width;
    std::fill(out, out + width, 0.f);
    for (int32_t x = begin; x < end; ++x) out[x] = keep[x];
  } else {
    uint8_t* out = static_cast<uint8_t*>(p.out) + row * packed_bytes(width);
    std::fill(out, out + packed_bytes(width), uint8_t{0});
    for (int32_t x = begin; x < end; ++x) out[x / 8] |= static_cast<uint8_t>(keep[x] << x % 8);
  }
}

template <int kTaps>
void mask_band(const MasksParams& p, const MaskTables& tables, int64_t band) {
  const int64_t bands = ceil_div(p.rows.size, kBandRows), mask = band / bands;
  const int64_t image = mask / p.count, index = mask % p.count;
  const int32_t first = static_cast<int32_t>(band % bands) * kBandRows;
  const int32_t last = std::min(first + kBandRows, p.rows.size), width = p.columns.size;
  const MaskBox box = kept_by_box(p, image, index);
  const PixelRange rows = p.crop_first ? pixels_made_of(tables.row, kTaps, box.rows) : box.rows;
  const PixelRange columns = p.crop_first ? pixels_made_of(tables.column, kTaps, box.columns) : box.columns;
  const bool empty = is_empty({rows, columns});
  std::vector<uint8_t> keep(width);
  std::vector<float> mixed(p.columns.in);
  const PixelRange low =
      empty ? PixelRange{0, 0}
            : PixelRange{tables.column[0][columns.low], tables.column[kTaps - 1][columns.high - 1] + 1};
  LowRows prototypes(p, image, index, box, low);
  for (int32_t y = first; y < last; ++y) {
    if (empty || y < rows.low || y >= rows.high) {
      write_mask_row(p, mask, y, keep.data(), 0, 0);
      continue;
    }
    MaskTaps taps{};
    const float* source[kTaps];
    for (int t = 0; t < kTaps; ++t) {
      source[t] = prototypes.row(tables.row[t][y]);
      taps.weight[t] = tables.row_weight[t][y];
    }
    for (int32_t x = low.low; x < low.high; ++x) {
      float values[kTaps];
      for (int t = 0; t < kTaps; ++t) values[t] = source[t][x];
      mixed[x] = mix<kTaps>(values, taps);
    }
    vectorised([=, &tables, values = mixed.data(), pixels = keep.data(), threshold = threshold_of(p)] {
      threshold_row<kTaps>(tables, values, threshold, columns.low, columns.high, pixels);
    });
    write_mask_row(p, mask, y, keep.data(), columns.low, columns.high);
  }
}

inline void mask_bands_between(const MasksParams& p, const MaskTables& tables, int64_t begin, int64_t end) {
  for (int64_t band = begin; band < end; ++band) {
    tables.taps == 1   ? mask_band<1>(p, tables, band)
    : tables.taps == 2 ? mask_band<2>(p, tables, band)
                       : mask_band<3>(p, tables, band);
  }
}

}  // namespace torch_fastdet::core
