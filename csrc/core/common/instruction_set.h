// x86 instruction sets beyond the baseline. A function marked TORCH_FASTDET_AVX2 is compiled for AVX2, FMA and F16C;
// call it only where has_avx2(). On other architectures the macro is not defined and has_avx2() is false.
//
// Results do not depend on the path: the build turns floating-point contraction off.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define TORCH_FASTDET_AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

namespace torch_fastdet::core {

inline bool has_avx2() {
#ifdef TORCH_FASTDET_AVX2
  static const bool has =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return has;
#else
  return false;
#endif
}

}  // namespace torch_fastdet::core
