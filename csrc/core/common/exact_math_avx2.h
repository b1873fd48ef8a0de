// Compute exact_math.h for eight numbers at a time, with the same bits.
#pragma once

#include "core/common/exact_math.h"
#include "core/common/instruction_set.h"

#ifdef TORCH_FASTDET_AVX2
#include <immintrin.h>

namespace torch_fastdet::core {

TORCH_FASTDET_AVX2 inline __m256 multiply_add_avx2(__m256 a, __m256 b, float c) {  // rounded twice, as in exp_rn()
  return _mm256_add_ps(_mm256_mul_ps(a, b), _mm256_set1_ps(c));
}

TORCH_FASTDET_AVX2 inline __m256 exp_rn_avx2(__m256 x) {
  const __m256 round = _mm256_set1_ps(12582912.f);
  const __m256 shifted = _mm256_add_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)), round);
  const __m256 n = _mm256_sub_ps(shifted, round);
  __m256 r = _mm256_sub_ps(x, _mm256_mul_ps(n, _mm256_set1_ps(0.693359375f)));
  r = _mm256_sub_ps(r, _mm256_mul_ps(n, _mm256_set1_ps(-2.12194440e-4f)));
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = multiply_add_avx2(p, r, 1.3981999507e-3f);
  p = multiply_add_avx2(p, r, 8.3334519073e-3f);
  p = multiply_add_avx2(p, r, 4.1665795894e-2f);
  p = multiply_add_avx2(p, r, 1.6666665459e-1f);
  p = multiply_add_avx2(p, r, 5.0000001201e-1f);
  p = _mm256_add_ps(_mm256_mul_ps(p, _mm256_mul_ps(r, r)), r);
  p = _mm256_add_ps(p, _mm256_set1_ps(1.f));
  const __m256i power = _mm256_add_epi32(_mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(round)),
                                         _mm256_set1_epi32(126));
  const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(power, 23));
  const __m256 y = _mm256_mul_ps(_mm256_mul_ps(p, scale), _mm256_set1_ps(2.f));
  const __m256 large = _mm256_cmp_ps(x, _mm256_set1_ps(88.72f), _CMP_GT_OQ);
  const __m256 small = _mm256_cmp_ps(x, _mm256_set1_ps(-86.9f), _CMP_LT_OQ);
  const __m256 infinity = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
  return _mm256_andnot_ps(small, _mm256_blendv_ps(y, infinity, large));
}

}  // namespace torch_fastdet::core
#endif
