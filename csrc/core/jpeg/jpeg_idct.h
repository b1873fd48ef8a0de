// Compute the inverse DCT of a block on the CPU, for any processor and for AVX2, with the same results.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/common/instruction_set.h"
#include "core/jpeg/jpeg_math.h"

#ifdef TORCH_FASTDET_AVX2
#include <immintrin.h>
#endif

namespace torch_fastdet::core {

// Hold the dequantized coefficients of a block in row-major order.
struct alignas(32) JpegCoefficients {
  int16_t x[kJpegBlock];
  int last;  // index of the last one, in the file's order
};

// Compute eight lanes of the inverse DCT with a vector type of the compiler, for any processor.
struct JpegEightLanes {
  typedef int32_t Signed __attribute__((vector_size(32)));
  typedef uint32_t Unsigned __attribute__((vector_size(32)));
  static TORCH_FASTDET_HOST_DEVICE void wrap16(Signed& x) { x = (x << 16) >> 16; }
  static TORCH_FASTDET_HOST_DEVICE void saturate16(Signed& x) {
    x = x > 32767 ? Signed{} + 32767 : x;
    x = x < -32768 ? Signed{} - 32768 : x;
  }
};
template <int kShift>
TORCH_FASTDET_HOST_DEVICE void jpeg_idct_lanes(int (&x)[8][8]) {
  JpegEightLanes::Signed v[8];
  std::memcpy(v, x, sizeof v);
  jpeg_idct8<kShift, JpegEightLanes>(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]);
  std::memcpy(x, v, sizeof v);
}

// Transform a block whose coefficients other than DC are all zero.
TORCH_FASTDET_HOST_DEVICE void jpeg_idct_level(const JpegCoefficients& in, uint8_t* out, int pitch) {
  int x[8] = {jpeg_idct_flat_column(in.x[0]), 0, 0, 0, 0, 0, 0, 0};
  jpeg_idct8<18>(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]);
  const int level = jpeg_clamp(x[0] + 128);
  for (int y = 0; y < 8; ++y) std::memset(out + static_cast<int64_t>(y) * pitch, level, 8);
}

TORCH_FASTDET_HOST_DEVICE void jpeg_idct_any_processor(const JpegCoefficients& in, uint8_t* out, int pitch) {
  alignas(32) int a[8][8], b[8][8];
  uint64_t any = 0, part;
  for (int i = 8; i < kJpegBlock; i += 4) {
    std::memcpy(&part, in.x + i, 8);
    any |= part;
  }
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) a[i][j] = in.x[8 * i + j];
  }
  if (any == 0) {
    for (int i = 7; i >= 0; --i) {
      for (int j = 0; j < 8; ++j) a[i][j] = jpeg_idct_flat_column(a[0][j]);
    }
  } else {
    jpeg_idct_lanes<11>(a);
  }
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) b[j][i] = a[i][j];
  }
  jpeg_idct_lanes<18>(b);
  for (int y = 0; y < 8; ++y) {
    uint8_t* row = out + static_cast<int64_t>(y) * pitch;
    for (int x = 0; x < 8; ++x) row[x] = static_cast<uint8_t>(jpeg_clamp(b[x][y] + 128));
  }
}

#ifdef TORCH_FASTDET_AVX2
// Saturation happens when the values are packed.
struct JpegAvx2Lanes : JpegEightLanes {
  static TORCH_FASTDET_HOST_DEVICE void saturate16(Signed&) {}
};

// Transpose eight rows of 32-bit values into eight columns of 16 bits, saturated: out[i] is columns i and i + 4.
TORCH_FASTDET_AVX2 inline void jpeg_transpose_avx2(const JpegEightLanes::Signed (&v)[8], __m256i (&out)[4]) {
  __m256i pairs[4];
  for (int i = 0; i < 4; ++i) pairs[i] = _mm256_packs_epi32((__m256i)v[2 * i], (__m256i)v[2 * i + 1]);
  __m256i quads[4];  // rows 0 to 3, then 4 to 7
  for (int i = 0; i < 4; i += 2) {
    const __m256i even = _mm256_unpacklo_epi16(pairs[i], pairs[i + 1]);
    const __m256i odd = _mm256_unpackhi_epi16(pairs[i], pairs[i + 1]);
    quads[i] = _mm256_unpacklo_epi16(even, odd);
    quads[i + 1] = _mm256_unpackhi_epi16(even, odd);
  }
  out[0] = _mm256_unpacklo_epi64(quads[0], quads[2]), out[1] = _mm256_unpackhi_epi64(quads[0], quads[2]);
  out[2] = _mm256_unpacklo_epi64(quads[1], quads[3]), out[3] = _mm256_unpackhi_epi64(quads[1], quads[3]);
}

TORCH_FASTDET_AVX2 inline void jpeg_idct_block_avx2(const JpegCoefficients& in, uint8_t* out, int pitch) {
  JpegEightLanes::Signed v[8];
  for (int i = 0; i < 8; ++i) {
    const __m128i row = _mm_load_si128(reinterpret_cast<const __m128i*>(in.x + 8 * i));
    v[i] = (JpegEightLanes::Signed)_mm256_cvtepi16_epi32(row);
  }
  const JpegEightLanes::Signed lower = v[1] | v[2] | v[3] | v[4] | v[5] | v[6] | v[7];
  if (_mm256_testz_si256((__m256i)lower, (__m256i)lower)) {  // jpeg_idct_flat_column()
    v[0] = v[0] << 2;
    JpegEightLanes::wrap16(v[0]);
    for (int i = 1; i < 8; ++i) v[i] = v[0];
  } else {
    jpeg_idct8<11, JpegAvx2Lanes>(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]);
  }
  __m256i turned[4];
  jpeg_transpose_avx2(v, turned);
  for (int i = 0; i < 4; ++i) {
    v[i] = (JpegEightLanes::Signed)_mm256_cvtepi16_epi32(_mm256_castsi256_si128(turned[i]));
    v[i + 4] = (JpegEightLanes::Signed)_mm256_cvtepi16_epi32(_mm256_extracti128_si256(turned[i], 1));
  }
  jpeg_idct8<18, JpegAvx2Lanes>(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]);
  jpeg_transpose_avx2(v, turned);
  for (int i = 0; i < 4; i += 2) {
    const __m256i level = _mm256_set1_epi16(128);
    const __m256i bytes =
        _mm256_packus_epi16(_mm256_adds_epi16(turned[i], level), _mm256_adds_epi16(turned[i + 1], level));
    for (int half = 0; half < 2; ++half) {
      const __m128i two = half ? _mm256_extracti128_si256(bytes, 1) : _mm256_castsi256_si128(bytes);
      uint8_t* const to = out + static_cast<int64_t>(4 * half + i) * pitch;
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to), two);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to + pitch), _mm_unpackhi_epi64(two, two));
    }
  }
}
#endif

// Transform eight samples in each of eight rows.
template <bool kAvx2>
TORCH_FASTDET_HOST_DEVICE void jpeg_idct_block(const JpegCoefficients& in, uint8_t* out, int pitch) {
  if (in.last == 0) return jpeg_idct_level(in, out, pitch);
#ifdef TORCH_FASTDET_AVX2
  if constexpr (kAvx2) return jpeg_idct_block_avx2(in, out, pitch);
#endif
  jpeg_idct_any_processor(in, out, pitch);
}

}  // namespace torch_fastdet::core
