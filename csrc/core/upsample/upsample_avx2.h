// Sum 2x2 squares of 16-bit floats, eight at a time. Scalar conversions would cost ten times as much as reading.
#pragma once

#include "core/common/instruction_set.h"

#ifdef TORCH_FASTDET_AVX2
#include <immintrin.h>

#include <cstdint>

#include "core/upsample/upsample_loops.h"

namespace torch_fastdet::core {

struct Float16Lanes {
  TORCH_FASTDET_AVX2 static __m256 load(const void* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
  TORCH_FASTDET_AVX2 static void store(void* to, __m256 value) {
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

struct BFloat16Lanes {
  TORCH_FASTDET_AVX2 static __m256 load(const void* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  // Round to nearest, ties to even; NaN stays NaN.
  TORCH_FASTDET_AVX2 static void store(void* to, __m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i high = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }
};

// Compute SumSquares for a 16-bit T, and leave the last few elements to it.
template <typename T, typename Lanes>
struct SumSquaresAvx2 {
  TORCH_FASTDET_AVX2 static void rows(const T* top, const T* bottom, T* out, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const __m256 top_low = Lanes::load(top + 2 * i), top_high = Lanes::load(top + 2 * i + 8);
      const __m256 bottom_low = Lanes::load(bottom + 2 * i), bottom_high = Lanes::load(bottom + 2 * i + 8);
      // Add even and odd elements, in the order 0-3 8-11 4-7 12-15 of pairs. The order is restored once, at the end.
      __m256 sum =
          _mm256_add_ps(_mm256_shuffle_ps(top_low, top_high, 0x88), _mm256_shuffle_ps(top_low, top_high, 0xdd));
      sum = _mm256_add_ps(sum, _mm256_shuffle_ps(bottom_low, bottom_high, 0x88));
      sum = _mm256_add_ps(sum, _mm256_shuffle_ps(bottom_low, bottom_high, 0xdd));
      Lanes::store(out + i, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sum), 0xd8)));
    }
    SumSquares<T, float>::rows(top + 2 * i, bottom + 2 * i, out + i, count - i);
  }

  TORCH_FASTDET_AVX2 static void pixels(const T* top_left, const T* top_right, const T* bottom_left,
                                        const T* bottom_right, T* out, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      __m256 sum = _mm256_add_ps(Lanes::load(top_left + i), Lanes::load(top_right + i));
      sum = _mm256_add_ps(sum, Lanes::load(bottom_left + i));
      sum = _mm256_add_ps(sum, Lanes::load(bottom_right + i));
      Lanes::store(out + i, sum);
    }
    SumSquares<T, float>::pixels(top_left + i, top_right + i, bottom_left + i, bottom_right + i, out + i, count - i);
  }
};

}  // namespace torch_fastdet::core
#endif
