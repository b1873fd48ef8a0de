// Test that the emulator finds what it should, with kernels that have one mistake each.
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <vector>

#include "emulator.h"

namespace {

using emulator::Launch;

// Each thread hands its number to its left neighbor, and thread 0 to the last one.
void rotate(int* out, bool with_barrier) {
  static char key;
  auto& shared = emulator::shared<int[64]>(&key);
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (with_barrier) __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = shared[(threadIdx.x + 1) % 64];
}

#ifndef EMULATOR_TSAN  // which says so itself
TEST(Emulator, FindsAMissingBarrier) {
  bool wrong = false;
  for (int attempt = 0; attempt < 20; ++attempt) {  // shared memory may hold what an earlier block wrote
    std::vector<int> out(64);
    rotate << Launch(1, 64)(out.data(), false);
    for (int i = 0; i < 64; ++i) wrong = wrong || out[i] != (i + 1) % 64;
  }
  EXPECT_TRUE(wrong);
}
#endif

void diverging_barrier() {
  if (threadIdx.x < 32) __syncthreads();
}
void two_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
void ended_lane() {
  if (threadIdx.x % 32 == 7) return;
  __syncwarp();
}
void lanes_apart() {
  if (threadIdx.x % 2) {
    __ballot_sync(0xffffffffu, true);
  } else {
    __ballot_sync(0xffffffffu, false);
  }
}
void lane_that_waits_elsewhere() {
  if (threadIdx.x % 2) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

TEST(Emulator, FindsThreadsThatDoNotMeet) {
  for (const auto kernel : {diverging_barrier, two_barriers, ended_lane, lanes_apart, lane_that_waits_elsewhere}) {
    EXPECT_THROW(kernel << Launch(1, 64)(), std::runtime_error);
  }
  std::vector<int> out(64);
  rotate << Launch(1, 64)(out.data(), true);  // and goes on after it
  EXPECT_EQ(out[63], 0);
}

struct alignas(16) Wide {
  float x[4];
};
void copy_wide(const float* from, Wide* to) {
  *to = *reinterpret_cast<const Wide*>(from);
}

TEST(Emulator, FindsAMisalignedAccess) {
  alignas(16) static float from[8];
  static Wide to;
  copy_wide << Launch(1, 1)(from + 4, &to);
  EXPECT_DEATH(copy_wide << Launch(1, 1)(from + 1, &to), "misaligned address");
}

void write_dynamic() {
  emulator::dynamic_shared()[threadIdx.x] = 0;
}

TEST(Emulator, RefusesWhatADeviceRefuses) {
  for (const Launch& launch : {Launch(0, 32), Launch(1, 0), Launch(1, 1025), Launch(dim3(1, 65536), 32)}) {
    write_dynamic << launch();
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  }
  write_dynamic << Launch(1, 32, 100 << 10)();
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  cudaFuncSetAttribute(write_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10);
  write_dynamic << Launch(1, 32, 100 << 10)();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
