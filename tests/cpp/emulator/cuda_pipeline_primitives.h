// Asynchronous copies into shared memory arrive as late as possible: when their thread waits for them.
#pragma once

#include <cstring>
#include <stdexcept>

#include "emulator.h"

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  const auto misaligned = [&](const void* at) { return reinterpret_cast<uintptr_t>(at) % bytes != 0; };
  if ((bytes != 4 && bytes != 8 && bytes != 16) || misaligned(to) || misaligned(from)) {
    throw std::runtime_error("__pipeline_memcpy_async: a misaligned copy");
  }
  emulator::put_off({to, from, bytes});
}

inline void __pipeline_commit() {
  emulator::commit_copies();
}

// Wait for all but the last `left` commits.
inline void __pipeline_wait_prior(size_t left) {
  for (emulator::Copy copy; emulator::next_copy(left, copy);) std::memcpy(copy.to, copy.from, copy.bytes);
}
