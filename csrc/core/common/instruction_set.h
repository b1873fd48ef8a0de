// These are x86 instruction sets beyond the baseline. A function marked TORCH_FASTDET_AVX2 is compiled for AVX2, FMA
// and F16C; call it only if has_avx2(). On other architectures the macro is not defined and has_avx2() is false.
//
// Results do not depend on the code path, because the build disables floating-point contraction.
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

#ifdef TORCH_FASTDET_AVX2
template <typename F>
TORCH_FASTDET_AVX2 __attribute__((flatten)) auto run_avx2(F f) {
  return f();
}
#endif

template <typename F>
__attribute__((flatten)) auto run_baseline(F f) {
  return f();
}

// Call f, or its AVX2 copy. f should capture scalars by value: by reference, its outputs might alias them.
template <typename F>
auto vectorised(const F& f) {
#ifdef TORCH_FASTDET_AVX2
  if (has_avx2()) return run_avx2(f);
#endif
  return run_baseline(f);
}

}  // namespace torch_fastdet::core
