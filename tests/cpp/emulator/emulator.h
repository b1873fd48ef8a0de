// This is CUDA's device language for a host compiler: unchanged kernels of csrc/core run on the CPU, so that their
// indexing and synchronization can be tested without a GPU. It is included before every kernel source. See emulator.cpp
// for how threads run, and translate.py for the little that a host compiler cannot parse.
//
// It finds wrong results under any order of threads and blocks, reads of uninitialized shared memory (which holds
// garbage), barriers and warp intrinsics that not all threads reach, launches that a device would refuse, and
// misaligned accesses (by UBSan, in every build). With AddressSanitizer it finds accesses out of bounds, also of shared
// memory; with ThreadSanitizer, data races between threads that no barrier, fence or __syncwarp orders. It does not
// model weaker memory orders, clusters or timing.
#pragma once

#include <cuda_runtime.h>
#include <math.h>

#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

// The host's definitions of these are wrong or slow to compile.
#undef __forceinline__
#define __forceinline__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __global__
#define __global__
#undef __device__
#define __device__
#undef __host__
#define __host__

// The scheduler sets these before a thread continues.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulator {

// A place in a kernel identifies barriers of threads and appears in messages.
struct Site {
  const char* intrinsic;
  const char* file;
  int line;
};

// Seed the order in which threads and blocks run, and the garbage in shared memory.
void seed(uint64_t value);
uint64_t random_bits();

void barrier(const Site& site);
// Wait for all threads of the block; return whether `any` was true for one of them.
bool barrier_or(const Site& site, bool any);
// exchange() waits for the lanes of `mask` and returns the value of lane i in element i.
struct Lanes {
  uint64_t value[32];
};
Lanes exchange(const Site& site, unsigned mask, uint64_t value);
void sync_warp(const Site& site, unsigned mask);
void fence();
void preempt();  // lets other threads run on, now and then
int lane();

// These are this thread's asynchronous copies.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};
void put_off(const Copy& copy);
void commit_copies();
// Return the next copy that a wait for all but the last `left` commits waits for.
bool next_copy(size_t left, Copy& copy);

void* shared_memory(const void* variable, size_t bytes);
unsigned char* dynamic_shared();
template <typename T>
T& shared(const void* variable) {
  static_assert(alignof(T) <= 16, "shared memory is aligned to 16 bytes");
  return *static_cast<T*>(shared_memory(variable, sizeof(T)));
}

template <typename T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8, "lanes exchange up to 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof value);
  return value;
}

template <typename T>
T shuffle(const Site& site, unsigned mask, T value, int source) {
  const Lanes lanes = exchange(site, mask, to_bits(value));
  if (source < 0 || source > 31) return value;
  // The value of a lane outside the mask is undefined.
  return from_bits<T>(mask >> source & 1 ? lanes.value[source] : random_bits());
}

inline unsigned ballot(const Site& site, unsigned mask, bool predicate) {
  const Lanes lanes = exchange(site, mask, predicate);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (mask >> i & 1) && lanes.value[i] ? 1u << i : 0;
  return bits;
}

// This runs a function of any type, without its arguments, for one thread.
using Body = void (*)(const void* arguments);

struct Shape {
  dim3 grid, block;
  size_t shared_bytes;
};
// Run a kernel to its end. cudaGetLastError reports what a device would refuse; undefined behavior throws.
void run(const Shape& shape, const void* kernel, Body body, const void* arguments);

template <typename... Parameters>
void run(const Shape& shape, void (*kernel)(Parameters...), std::tuple<std::decay_t<Parameters>...> arguments) {
  using Call = std::pair<decltype(kernel), decltype(arguments)>;
  const Call call(kernel, std::move(arguments));
  run(
      shape, reinterpret_cast<const void*>(kernel),
      [](const void* data) {
        const Call& call = *static_cast<const Call*>(data);
        std::apply(call.first, call.second);
      },
      &call);
}

// kernel<<<grid, block, bytes, stream>>>(arguments) becomes kernel << Launch(grid, block, bytes, stream)(arguments).
template <typename... Arguments>
struct Bound {
  Shape shape;
  std::tuple<Arguments...> arguments;
};
struct Launch {
  Shape shape;
  explicit Launch(dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t = nullptr)
      : shape{grid, block, shared_bytes} {}
  template <typename... Arguments>
  Bound<Arguments...> operator()(Arguments... arguments) const {
    return {shape, {arguments...}};
  }
};
template <typename... Parameters, typename... Arguments>
void operator<<(void (*kernel)(Parameters...), const Bound<Arguments...>& bound) {
  run(bound.shape, kernel, std::tuple<std::decay_t<Parameters>...>(bound.arguments));
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_ex(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... arguments) {
  if (config->numAttrs) return cudaErrorNotSupported;  // clusters
  kernel << Launch(config->gridDim, config->blockDim, config->dynamicSmemBytes)(arguments...);
  return cudaPeekAtLastError();
}

}  // namespace emulator

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}

#define EMULATOR_SITE(name) (::emulator::Site{name, __FILE__, __LINE__})
#define cudaLaunchKernelEx ::emulator::launch_ex

#define __syncthreads() ::emulator::barrier(EMULATOR_SITE("__syncthreads"))
#define __syncthreads_or(predicate) ::emulator::barrier_or(EMULATOR_SITE("__syncthreads_or"), (predicate) != 0)
#define EMULATOR_FIRST(first, ...) (first)
#define __syncwarp(...) \
  ::emulator::sync_warp(EMULATOR_SITE("__syncwarp"), EMULATOR_FIRST(__VA_ARGS__ __VA_OPT__(, ) 0xffffffffu))
#define __ballot_sync(mask, predicate) ::emulator::ballot(EMULATOR_SITE("__ballot_sync"), mask, (predicate) != 0)
#define __any_sync(mask, predicate) (::emulator::ballot(EMULATOR_SITE("__any_sync"), mask, (predicate) != 0) != 0)
#define __all_sync(mask, predicate) (::emulator::ballot(EMULATOR_SITE("__all_sync"), mask, (predicate) == 0) == 0)
#define __shfl_sync(mask, value, lane) ::emulator::shuffle(EMULATOR_SITE("__shfl_sync"), mask, value, (lane)&31)
#define __shfl_xor_sync(mask, value, bits) \
  ::emulator::shuffle(EMULATOR_SITE("__shfl_xor_sync"), mask, value, ::emulator::lane() ^ (bits))
#define __shfl_up_sync(mask, value, delta) \
  ::emulator::shuffle(EMULATOR_SITE("__shfl_up_sync"), mask, value, ::emulator::lane() - (delta))
#define __shfl_down_sync(mask, value, delta) \
  ::emulator::shuffle(EMULATOR_SITE("__shfl_down_sync"), mask, value, ::emulator::lane() + (delta))
#define __threadfence() ::emulator::fence()

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}
// These reads bypass what a block cannot keep coherent, so they never race with atomics.
template <typename T>
T __ldcg(const T* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}
inline double __ldcg(const double* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}
template <typename T>
void __stcg(T* address, T value) {
  *address = value;
}
inline unsigned __float_as_uint(float x) {
  return emulator::from_bits<unsigned>(emulator::to_bits(x));
}
inline float __uint_as_float(unsigned x) {
  return emulator::from_bits<float>(x);
}
inline int __float2int_rn(float x) {
  return static_cast<int>(lrintf(x));
}
inline long long __float2ll_rn(float x) {
  return llrintf(x);
}
inline long long __double2ll_rn(double x) {
  return llrint(x);
}
inline long long __double_as_longlong(double x) {
  return emulator::from_bits<long long>(emulator::to_bits(x));
}
inline double __longlong_as_double(long long x) {
  return emulator::from_bits<double>(emulator::to_bits(x));
}

// Atomics are relaxed, as on the device: only fences and barriers order other writes of a thread.
template <typename T>
T atomicAdd(T* address, T value) {
  emulator::preempt();
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicOr(T* address, T value) {
  emulator::preempt();
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicAnd(T* address, T value) {
  emulator::preempt();
  return __atomic_fetch_and(address, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicExch(T* address, T value) {
  emulator::preempt();
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
template <typename T>
T atomicMax(T* address, T value) {
  emulator::preempt();
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
