// This is core/common/tensor_core.cuh for the emulator: the same lanes have the same elements.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "core/common/dtype.cuh"
#include "emulator.h"

namespace torch_fastdet::core {

template <bool kTransposed>
void load_matrices(uint32_t (&matrices)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16) throw std::runtime_error("load_matrices: a misaligned row");
  const emulator::Lanes rows = emulator::exchange(EMULATOR_SITE("load_matrices"), 0xffffffffu, emulator::to_bits(row));
  const int lane = emulator::lane(), first = lane / 4, second = 2 * (lane % 4);
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int k = 0; k < 2; ++k) {
      const int i = kTransposed ? second + k : first, j = kTransposed ? first : second + k;
      const auto* const from = emulator::from_bits<const uint16_t*>(rows.value[m * 8 + i]);
      pair[k] = from[j];
    }
    std::memcpy(&matrices[m], pair, sizeof pair);
  }
}

template <typename T>
void multiply_add(float (&sums)[4], const uint32_t (&left)[4], uint32_t upper, uint32_t lower) {
  const emulator::Site site = EMULATOR_SITE("multiply_add");
  const auto pair = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  const emulator::Lanes near = emulator::exchange(site, 0xffffffffu, pair(left[0], left[1]));
  const emulator::Lanes far = emulator::exchange(site, 0xffffffffu, pair(left[2], left[3]));
  const emulator::Lanes right = emulator::exchange(site, 0xffffffffu, pair(upper, lower));
  const auto number = [](uint64_t bits) { return to_arithmetic(emulator::from_bits<T>(bits)); };
  // Return element k of 16 from the registers of four lanes that begin at `lane`.
  const auto element = [&](const emulator::Lanes& low, const emulator::Lanes& high, int half, int lane, int k) {
    const uint64_t both = (k < 8 ? low : high).value[lane + k % 8 / 2];
    return number(both >> (32 * half + 16 * (k % 2)));
  };
  const int lane = emulator::lane();
  for (int s = 0; s < 4; ++s) {
    const int row = lane / 4, column = 2 * (lane % 4) + s % 2;
    for (int k = 0; k < 16; ++k) {
      const uint64_t both = right.value[column * 4 + k % 8 / 2];
      sums[s] += element(near, far, s / 2, row * 4, k) * number(both >> (32 * (k / 8) + 16 * (k % 2)));
    }
  }
}

}  // namespace torch_fastdet::core
