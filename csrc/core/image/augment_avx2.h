// Run the inner loops of augmentation with AVX2, four or eight pixels at a time, with the same results.
#pragma once

#include <immintrin.h>

#include "core/common/instruction_set.h"
#include "core/image/augment_rows.h"

namespace torch_fastdet::core {

// Load eight bytes at each offset. The first six are two pixels.
TORCH_FASTDET_AVX2 inline __m128i load_two_pairs(const uint8_t* base, const int64_t* offsets) {
  const __m128d low = _mm_castsi128_pd(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(base + offsets[0])));
  return _mm_castpd_si128(_mm_loadh_pd(low, reinterpret_cast<const double*>(base + offsets[1])));
}

TORCH_FASTDET_AVX2 inline __m256i load_pairs(const uint8_t* base, const int64_t* offsets) {
  const __m128i low = load_two_pairs(base, offsets), high = load_two_pairs(base, offsets + 2);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

// Compute the offsets of four pixels from a patch's origin.
TORCH_FASTDET_AVX2 inline void pixel_offsets(__m128i x, __m128i y, __m256i pitch, int64_t* offsets) {
  // Both factors are below 2^31, so the product needs 64 bits.
  const __m256i rows = _mm256_mul_epi32(_mm256_cvtepi32_epi64(y), pitch);
  const __m256i columns = _mm256_mul_epi32(_mm256_cvtepi32_epi64(x), _mm256_set1_epi64x(3));
  _mm256_store_si256(reinterpret_cast<__m256i*>(offsets), _mm256_add_epi64(rows, columns));
}

// Sample four pixels of a patch at points of 1/32 pixel. Eight bytes from its pixels on must be readable.
TORCH_FASTDET_AVX2 inline __m128i fixed_pixels(const Patch& patch, __m128i px, __m128i py) {
  const uint8_t* base = patch.data + patch.origin;
  const __m128i fraction = _mm_set1_epi32(kWarpFraction), scale = _mm_set1_epi32(kWarpScale);
  // `pairs` orders each pair as b0 b1 g0 g1 r0 r1, and `words` repeats a pixel's weights for its four words or dwords.
  const __m256i pairs = _mm256_setr_epi8(0, 3, 1, 4, 2, 5, -1, -1, 8, 11, 9, 12, 10, 13, -1, -1,  //
                                         0, 3, 1, 4, 2, 5, -1, -1, 8, 11, 9, 12, 10, 13, -1, -1);
  const __m256i words = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 8, 9, 8, 9, 8, 9, 8, 9,  //
                                         0, 1, 0, 1, 0, 1, 0, 1, 8, 9, 8, 9, 8, 9, 8, 9);
  const __m256i half = _mm256_set1_epi32(512);
  alignas(32) int64_t offsets[4];
  pixel_offsets(_mm_srai_epi32(px, kWarpBits), _mm_srai_epi32(py, kWarpBits), _mm256_set1_epi64x(patch.pitch), offsets);
  const __m128i fx = _mm_and_si128(px, fraction), fy = _mm_and_si128(py, fraction);
  const __m256i weight_x =
      _mm256_shuffle_epi8(_mm256_cvtepu32_epi64(_mm_or_si128(_mm_sub_epi32(scale, fx), _mm_slli_epi32(fx, 8))), words);
  const __m256i weight_y = _mm256_cvtepu32_epi64(_mm_or_si128(_mm_sub_epi32(scale, fy), _mm_slli_epi32(fy, 16)));
  const __m256i top = _mm256_maddubs_epi16(_mm256_shuffle_epi8(load_pairs(base, offsets), pairs), weight_x);
  const __m256i bottom =
      _mm256_maddubs_epi16(_mm256_shuffle_epi8(load_pairs(base + patch.pitch, offsets), pairs), weight_x);
  const __m256i even = _mm256_madd_epi16(_mm256_unpacklo_epi16(top, bottom), _mm256_shuffle_epi32(weight_y, 0x00));
  const __m256i odd = _mm256_madd_epi16(_mm256_unpackhi_epi16(top, bottom), _mm256_shuffle_epi32(weight_y, 0xaa));
  const __m256i packed = _mm256_packs_epi32(_mm256_srli_epi32(_mm256_add_epi32(even, half), 10),
                                            _mm256_srli_epi32(_mm256_add_epi32(odd, half), 10));
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi16(packed, packed), 0x08));
}

TORCH_FASTDET_AVX2 inline void warp_fixed_avx2(const WarpSpan<FixedLine>& s) {
  const Patch patch = *s.patch;
  const FixedLine line = *s.line;
  const __m128i row_x = _mm_set1_epi32(line.row_x), row_y = _mm_set1_epi32(line.row_y);
  int x = s.begin;
  for (; x + 4 <= s.end; x += 4) {
    const __m128i px =
        _mm_srai_epi32(_mm_add_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line.column_x + x)), row_x), 5);
    const __m128i py =
        _mm_srai_epi32(_mm_add_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line.column_y + x)), row_y), 5);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(s.out + x), fixed_pixels(patch, px, py));
  }
  WarpSpan<FixedLine> rest = s;
  rest.begin = x;
  warp_span<3>(rest);
}

// Select the low halves of 64-bit lanes: of each 128 bits, two of `a` and then two of `b`.
TORCH_FASTDET_AVX2 inline __m256i low_words(__m256i a, __m256i b) {
  return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0x88));
}

// Hold eight pixel pairs: four bytes beginning with each pair's left pixel, and four beginning with its right one.
struct FloatPairs {
  __m256i left, right;
};

TORCH_FASTDET_AVX2 inline FloatPairs load_eight_pairs(const uint8_t* base, const int64_t* offsets) {
  // Load pairs 0 1 4 5 and 2 3 6 7, which low_words() puts in order.
  const __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(load_two_pairs(base, offsets)),
                                            load_two_pairs(base, offsets + 4), 1);
  const __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(load_two_pairs(base, offsets + 2)),
                                            load_two_pairs(base, offsets + 6), 1);
  return {low_words(a, b), low_words(_mm256_srli_epi64(a, 24), _mm256_srli_epi64(b, 24))};
}

// Blend the pairs' levels of one channel along x.
TORCH_FASTDET_AVX2 inline __m256 blend_pairs(const FloatPairs& pairs, int shift, __m256 fx) {
  const __m256i byte = _mm256_set1_epi32(255);
  const __m128i by = _mm_cvtsi32_si128(shift);
  const __m256 left = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(pairs.left, by), byte));
  const __m256 right = _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(pairs.right, by), byte));
  return _mm256_fmadd_ps(fx, _mm256_sub_ps(right, left), left);
}

// Hold eight points of a row in float32. `x` and `y` are whole pixels, or a pixel that no canvas has.
struct FloatPoints {
  __m256i x, y;
  __m256 fx, fy;
};

TORCH_FASTDET_AVX2 inline FloatPoints float_points(__m256 px, __m256 py) {
  const __m256 x = _mm256_floor_ps(px), y = _mm256_floor_ps(py);
  return {_mm256_cvttps_epi32(x), _mm256_cvttps_epi32(y), _mm256_sub_ps(px, x), _mm256_sub_ps(py, y)};
}

TORCH_FASTDET_AVX2 inline __m256i eight_from(int x) {
  return _mm256_add_epi32(_mm256_set1_epi32(x), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Blend points as fixed_pixels() does.
TORCH_FASTDET_AVX2 inline __m256i blend_points(const Patch& patch, const FloatPoints& p) {
  const uint8_t* base = patch.data + patch.origin;
  const __m256i pitch = _mm256_set1_epi64x(patch.pitch);
  alignas(32) int64_t offsets[8];
  pixel_offsets(_mm256_castsi256_si128(p.x), _mm256_castsi256_si128(p.y), pitch, offsets);
  pixel_offsets(_mm256_extracti128_si256(p.x, 1), _mm256_extracti128_si256(p.y, 1), pitch, offsets + 4);
  const FloatPairs top = load_eight_pairs(base, offsets), bottom = load_eight_pairs(base + patch.pitch, offsets);
  __m256i pixels = _mm256_setzero_si256();
  for (int shift = 0; shift < 24; shift += 8) {
    const __m256 above = blend_pairs(top, shift, p.fx), below = blend_pairs(bottom, shift, p.fx);
    const __m256i level = _mm256_cvtps_epi32(_mm256_fmadd_ps(p.fy, _mm256_sub_ps(below, above), above));
    pixels = _mm256_or_si256(pixels, _mm256_sll_epi32(level, _mm_cvtsi32_si128(shift)));
  }
  return pixels;
}

// Warp as warp_fixed_avx2() does, but in float32 and eight pixels at a time.
TORCH_FASTDET_AVX2 inline void warp_float_avx2(const WarpSpan<FloatLine>& s) {
  const Patch patch = *s.patch;
  const __m256 step_x = _mm256_set1_ps(s.line->step[0]), step_y = _mm256_set1_ps(s.line->step[1]);
  const __m256 row_x = _mm256_set1_ps(s.line->row[0]), row_y = _mm256_set1_ps(s.line->row[1]);
  if (s.end - s.begin < 8) return warp_span<3>(s);
  for (int at = s.begin; at < s.end; at += 8) {
    const int x = std::min(at, s.end - 8);  // the last eight may be computed twice
    const __m256 column = _mm256_cvtepi32_ps(eight_from(x));
    const FloatPoints points =
        float_points(_mm256_fmadd_ps(step_x, column, row_x), _mm256_fmadd_ps(step_y, column, row_y));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(s.out + x), blend_points(patch, points));
  }
}

// This copy is compiled with FMA instructions, where the plain build calls a function.
TORCH_FASTDET_AVX2 inline void warp_points_avx2(const Layer& layer, const FloatLine& line, int begin, int end,
                                                uint32_t* out) {
  warp_points<3>(layer, line, begin, end, out);
}

TORCH_FASTDET_AVX2 inline __m256i gather(const int* table, __m256i index) {
  return _mm256_i32gather_epi32(table, index, 4);
}
TORCH_FASTDET_AVX2 inline __m256 gather(const float* table, __m256i index) {
  return _mm256_i32gather_ps(table, index, 4);
}

// Return a quotient of OpenCV's division tables: see saturation_factor() and hue_factor(). 0 / 0 is not used.
TORCH_FASTDET_AVX2 inline __m256i factor(float numerator, __m256i by) {
  const __m256 quotient = _mm256_div_ps(_mm256_set1_ps(numerator), _mm256_cvtepi32_ps(by));
  return _mm256_cvttps_epi32(_mm256_add_ps(quotient, _mm256_set1_ps(0.5f)));
}

TORCH_FASTDET_AVX2 inline __m256i levels_of(__m256 x, bool round) {
  const __m256 scaled = _mm256_mul_ps(x, _mm256_set1_ps(255.f));
  return round ? _mm256_cvtps_epi32(scaled) : _mm256_cvttps_epi32(scaled);
}

TORCH_FASTDET_AVX2 inline __m256i choose(__m256i mask, __m256i yes, __m256i no) {
  return _mm256_blendv_epi8(no, yes, mask);
}

TORCH_FASTDET_AVX2 inline __m256i recolor8(const ColorTables& t, __m256i pixels, bool round) {
  const __m256i byte = _mm256_set1_epi32(255), one = _mm256_set1_epi32(1), rounding = _mm256_set1_epi32(2048);
  const __m256i b = _mm256_and_si256(pixels, byte), g = _mm256_and_si256(_mm256_srli_epi32(pixels, 8), byte);
  const __m256i r = _mm256_srli_epi32(pixels, 16);
  const __m256i v = _mm256_max_epi32(_mm256_max_epi32(b, g), r);
  const __m256i d = _mm256_sub_epi32(v, _mm256_min_epi32(_mm256_min_epi32(b, g), r));
  const __m256i two_d = _mm256_add_epi32(d, d);
  const __m256i from_g = _mm256_add_epi32(_mm256_sub_epi32(b, r), two_d);
  const __m256i from_b = _mm256_add_epi32(_mm256_sub_epi32(r, g), _mm256_add_epi32(two_d, two_d));
  __m256i h =
      choose(_mm256_cmpeq_epi32(v, r), _mm256_sub_epi32(g, b), choose(_mm256_cmpeq_epi32(v, g), from_g, from_b));
  h = _mm256_srai_epi32(_mm256_add_epi32(_mm256_mullo_epi32(h, factor(122880.f, d)), rounding), 12);
  h = _mm256_add_epi32(h, _mm256_and_si256(_mm256_srai_epi32(h, 31), _mm256_set1_epi32(180)));
  __m256i s = _mm256_srli_epi32(_mm256_add_epi32(_mm256_mullo_epi32(d, factor(1044480.f, v)), rounding), 12);
  // If the difference is zero, there is neither hue nor saturation, and nothing to divide by.
  const __m256i grey = _mm256_cmpeq_epi32(d, _mm256_setzero_si256());
  h = _mm256_andnot_si256(grey, h);
  s = _mm256_andnot_si256(grey, s);

  const __m256 unit = _mm256_set1_ps(1.f);
  const __m256 saturation = gather(t.saturation, s), value = gather(t.value, v);
  const __m256 hue = _mm256_mul_ps(_mm256_cvtepi32_ps(gather(t.hue, h)), _mm256_set1_ps(6.f / 180.f));
  __m256i sector = _mm256_cvttps_epi32(hue);
  const __m256 place = _mm256_sub_ps(hue, _mm256_cvtepi32_ps(sector));
  const __m256i six = _mm256_set1_epi32(6);
  sector = _mm256_sub_epi32(sector, _mm256_andnot_si256(_mm256_cmpgt_epi32(six, sector), six));
  const __m256i odd = _mm256_cmpeq_epi32(_mm256_and_si256(sector, one), one);
  const __m256 slope = _mm256_blendv_ps(_mm256_sub_ps(unit, place), place, _mm256_castsi256_ps(odd));
  const __m256i top = levels_of(value, round);
  const __m256i bottom = levels_of(_mm256_mul_ps(value, _mm256_sub_ps(unit, saturation)), round);
  const __m256i middle = levels_of(_mm256_mul_ps(value, _mm256_fnmadd_ps(saturation, slope, unit)), round);
  const __m256i pair = _mm256_srli_epi32(sector, 1);
  const __m256i first = _mm256_cmpeq_epi32(pair, _mm256_setzero_si256()), second = _mm256_cmpeq_epi32(pair, one);
  const __m256i high = choose(odd, top, middle), low = choose(odd, middle, top);
  const __m256i blue = choose(first, bottom, choose(second, high, low));
  const __m256i green = choose(first, high, choose(second, low, bottom));
  const __m256i red = choose(first, low, choose(second, bottom, high));
  return _mm256_or_si256(_mm256_or_si256(blue, _mm256_slli_epi32(green, 8)), _mm256_slli_epi32(red, 16));
}

// Convert whole vectors, which the row has space for. A vector that crosses `end` stores only the pixels before it.
TORCH_FASTDET_AVX2 inline void recolor_span_avx2(const ColorTables& t, uint32_t* row, int begin, int end, bool round) {
  for (int x = begin; x < end; x += 8) {
    alignas(32) uint32_t tail[8];
    __m256i* at = reinterpret_cast<__m256i*>(row + x);
    const __m256i colors = recolor8(t, _mm256_loadu_si256(at), round);
    if (x + 8 <= end) {
      _mm256_storeu_si256(at, colors);
    } else {
      _mm256_store_si256(reinterpret_cast<__m256i*>(tail), colors);
      std::memcpy(row + x, tail, static_cast<size_t>(end - x) * sizeof(uint32_t));
    }
  }
}

// 16 bytes hold five pixels. The plain loop handles the last few of a row, to read no bytes past its end.
TORCH_FASTDET_AVX2 inline void expand_avx2(const uint8_t* from, uint32_t* words, int count) {
  const __m128i spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
  int x = 0;
  for (; x + 6 <= count; x += 4) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 3 * x));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words + x), _mm_shuffle_epi8(bytes, spread));
  }
  expand(from + 3 * x, words + x, count - x);
}

TORCH_FASTDET_AVX2 inline void plane_avx2(const uint32_t* row, int width, int shift, uint8_t* to) {
  const __m256i byte = _mm256_set1_epi32(255);
  const __m128i by = _mm_cvtsi32_si128(shift);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const auto* words = reinterpret_cast<const __m256i*>(row);
  int x = 0;
  for (; x + 32 <= width; x += 32, words += 4) {
    __m256i level[4];
    for (int i = 0; i < 4; ++i) level[i] = _mm256_and_si256(_mm256_srl_epi32(_mm256_loadu_si256(words + i), by), byte);
    const __m256i low = _mm256_packus_epi32(level[0], level[1]), high = _mm256_packus_epi32(level[2], level[3]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + x),
                        _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
  }
  plane(row + x, width - x, shift, to + x);
}

inline RowKernels row_kernels_avx2() {
  return {warp_fixed_avx2, warp_float_avx2, warp_points_avx2, recolor_span_avx2, expand_avx2, plane_avx2};
}

}  // namespace torch_fastdet::core
