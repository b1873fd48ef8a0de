// Run the inner loops of kLinear with AVX2, with the same results.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "core/image/augment_avx2.h"
#include "core/image/resize_rows.h"

namespace torch_fastdet::core {

// Apply blend_columns() to a tap's pixels, in three of four words. It reads eight bytes and uses six.
TORCH_FASTDET_AVX2 inline __m128i blend_pair(const uint8_t* row, const ColumnTap& tap) {
  const __m128i channels = _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1);
  const __m128i pair = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + tap.first));
  int weights;
  std::memcpy(&weights, &tap.first_weight, sizeof weights);
  return _mm_srai_epi32(_mm_madd_epi16(_mm_shuffle_epi8(pair, channels), _mm_set1_epi32(weights)), 4);
}

// Taps increase, so that only the last ones' eight bytes end past the row. Rows come from uncached memory, at distances
// that the processor does not predict: prefetching what the next rows need saves half of the total time.
TORCH_FASTDET_AVX2 inline void blend_columns3_avx2(const ColumnRow& row, const ColumnTap* taps, int count,
                                                   int16_t* out) {
  const int last = 3 * row.width - 8;
  const __m128i together = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, -1, -1, -1, -1);
  int x = 0;
  // A store writes two values too many, which the next pixel's store overwrites.
  for (; x + 3 <= count && taps[x + 1].first <= last; x += 2) {
    _mm_prefetch(reinterpret_cast<const char*>(row.data + row.next + taps[x].first), _MM_HINT_T0);
    const __m128i values = _mm_packs_epi32(blend_pair(row.data, taps[x]), blend_pair(row.data, taps[x + 1]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 3 * x), _mm_shuffle_epi8(values, together));
  }
  blend_columns_span<3>(row.data, taps, x, count, out);
}

TORCH_FASTDET_AVX2 inline __m256i blend_rows_16(const int16_t* top, const int16_t* bottom, __m256i top_weight,
                                                __m256i bottom_weight) {
  const __m256i t = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(top));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bottom));
  const __m256i sum = _mm256_add_epi16(_mm256_mulhi_epi16(t, top_weight), _mm256_mulhi_epi16(b, bottom_weight));
  return _mm256_srai_epi16(_mm256_add_epi16(sum, _mm256_set1_epi16(2)), 2);
}

TORCH_FASTDET_AVX2 inline void blend_rows_avx2(const int16_t* top, const int16_t* bottom, int top_weight,
                                               int bottom_weight, uint8_t* out, int64_t count) {
  const __m256i upper = _mm256_set1_epi16(static_cast<int16_t>(top_weight));
  const __m256i lower = _mm256_set1_epi16(static_cast<int16_t>(bottom_weight));
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i bytes = _mm256_packus_epi16(blend_rows_16(top + i, bottom + i, upper, lower),
                                              blend_rows_16(top + i + 16, bottom + i + 16, upper, lower));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_permute4x64_epi64(bytes, 0xd8));
  }
  blend_rows_span(top, bottom, top_weight, bottom_weight, out, i, count);
}

inline ResizeKernels resize_kernels_avx2() {
  return {blend_columns3_avx2, blend_rows_avx2};
}

}  // namespace torch_fastdet::core
