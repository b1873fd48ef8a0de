// recolor_span() for AVX-512, sixteen colours at a time, with the same results: see augment_avx2.h for the steps.
#pragma once

#include <immintrin.h>

#include "core/image/augment_avx2.h"

// GCC 12 takes its own header's undefined vectors for a mistake of ours (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define TORCH_FASTDET_IMAGE_AVX512 __attribute__((target("avx512f,avx2,fma")))

namespace torch_fastdet::core {

inline bool has_image_avx512() {
  static const bool has = has_image_avx2() && __builtin_cpu_supports("avx512f");
  return has;
}

TORCH_FASTDET_IMAGE_AVX512 inline __m512i factor16(float numerator, __m512i by) {
  const __m512 quotient = _mm512_div_ps(_mm512_set1_ps(numerator), _mm512_cvtepi32_ps(by));
  return _mm512_cvttps_epi32(_mm512_add_ps(quotient, _mm512_set1_ps(0.5f)));
}

TORCH_FASTDET_IMAGE_AVX512 inline __m512i levels16(__m512 x, bool round) {
  const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(255.f));
  return round ? _mm512_cvtps_epi32(scaled) : _mm512_cvttps_epi32(scaled);
}

TORCH_FASTDET_IMAGE_AVX512 inline __m512i choose16(__mmask16 mask, __m512i yes, __m512i no) {
  return _mm512_mask_mov_epi32(no, mask, yes);
}

struct Hsv16 {
  __m512i h, s, v;
};

TORCH_FASTDET_IMAGE_AVX512 inline Hsv16 hsv16(__m512i pixels) {
  const __m512i byte = _mm512_set1_epi32(255), rounding = _mm512_set1_epi32(2048), zero = _mm512_setzero_si512();
  const __m512i b = _mm512_and_si512(pixels, byte), g = _mm512_and_si512(_mm512_srli_epi32(pixels, 8), byte);
  const __m512i r = _mm512_srli_epi32(pixels, 16);
  const __m512i v = _mm512_max_epi32(_mm512_max_epi32(b, g), r);
  const __m512i d = _mm512_sub_epi32(v, _mm512_min_epi32(_mm512_min_epi32(b, g), r));
  const __m512i two_d = _mm512_add_epi32(d, d);
  __m512i h = _mm512_add_epi32(_mm512_sub_epi32(r, g), _mm512_add_epi32(two_d, two_d));
  h = _mm512_mask_add_epi32(h, _mm512_cmpeq_epi32_mask(v, g), _mm512_sub_epi32(b, r), two_d);
  h = _mm512_mask_sub_epi32(h, _mm512_cmpeq_epi32_mask(v, r), g, b);
  h = _mm512_srai_epi32(_mm512_add_epi32(_mm512_mullo_epi32(h, factor16(122880.f, d)), rounding), 12);
  h = _mm512_mask_add_epi32(h, _mm512_cmplt_epi32_mask(h, zero), h, _mm512_set1_epi32(180));
  const __m512i s = _mm512_srli_epi32(_mm512_add_epi32(_mm512_mullo_epi32(d, factor16(1044480.f, v)), rounding), 12);
  // Without a difference there is neither hue nor saturation, and nothing to divide by.
  const __mmask16 coloured = _mm512_cmpneq_epi32_mask(d, zero);
  return {_mm512_maskz_mov_epi32(coloured, h), _mm512_maskz_mov_epi32(coloured, s), v};
}

TORCH_FASTDET_IMAGE_AVX512 inline __m512i recolor16(const ColorTables& t, __m512i pixels, bool round) {
  const Hsv16 hsv = hsv16(pixels);
  const __m512 saturation = _mm512_i32gather_ps(hsv.s, t.saturation, 4);
  const __m512 value = _mm512_i32gather_ps(hsv.v, t.value, 4);
  const __m512 hue =
      _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_i32gather_epi32(hsv.h, t.hue, 4)), _mm512_set1_ps(6.f / 180.f));
  const __m512i one = _mm512_set1_epi32(1), six = _mm512_set1_epi32(6);
  const __m512 unit = _mm512_set1_ps(1.f);
  __m512i sector = _mm512_cvttps_epi32(hue);
  const __m512 place = _mm512_sub_ps(hue, _mm512_cvtepi32_ps(sector));
  sector = _mm512_mask_sub_epi32(sector, _mm512_cmpge_epi32_mask(sector, six), sector, six);
  const __mmask16 odd = _mm512_test_epi32_mask(sector, one);
  const __m512 slope = _mm512_mask_mov_ps(_mm512_sub_ps(unit, place), odd, place);
  const __m512i top = levels16(value, round);
  const __m512i bottom = levels16(_mm512_mul_ps(value, _mm512_sub_ps(unit, saturation)), round);
  const __m512i middle = levels16(_mm512_mul_ps(value, _mm512_fnmadd_ps(saturation, slope, unit)), round);
  const __m512i pair = _mm512_srli_epi32(sector, 1);
  const __mmask16 first = _mm512_cmpeq_epi32_mask(pair, _mm512_setzero_si512());
  const __mmask16 second = _mm512_cmpeq_epi32_mask(pair, one);
  const __m512i high = choose16(odd, top, middle), low = choose16(odd, middle, top);
  const __m512i blue = choose16(first, bottom, choose16(second, high, low));
  const __m512i green = choose16(first, high, choose16(second, low, bottom));
  const __m512i red = choose16(first, low, choose16(second, bottom, high));
  return _mm512_or_si512(_mm512_or_si512(blue, _mm512_slli_epi32(green, 8)), _mm512_slli_epi32(red, 16));
}

TORCH_FASTDET_IMAGE_AVX512 inline void recolor_span_avx512(const ColorTables& t, uint32_t* row, int begin, int end,
                                                           bool round) {
  for (int x = begin; x < end; x += 16) {
    const __mmask16 live = end - x >= 16 ? 0xffff : static_cast<__mmask16>((1u << (end - x)) - 1);
    const __m512i colors = recolor16(t, _mm512_maskz_loadu_epi32(live, row + x), round);
    _mm512_mask_storeu_epi32(row + x, live, colors);
  }
}

inline RowKernels row_kernels_avx512() {
  RowKernels kernels = row_kernels_avx2();
  kernels.recolor = recolor_span_avx512;
  return kernels;
}

}  // namespace torch_fastdet::core

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
