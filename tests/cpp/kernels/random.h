// The tests draw their problems with this.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <random>

namespace torch_fastdet::core {

// Return how many seeds a test tries: `count` (a quarter where a sanitizer is slow), EMULATOR_ROUNDS times as many, or
// one of EMULATOR_PART seeds.
inline uint64_t rounds(uint64_t count) {
#if defined(EMULATOR_ASAN) || defined(EMULATOR_TSAN)
  count = (count + 3) / 4;
#endif
  if (const char* part = std::getenv("EMULATOR_PART")) {
    const uint64_t parts = std::max<uint64_t>(1, std::strtoull(part, nullptr, 10));
    count = (count + parts - 1) / parts;
  }
  const char* factor = std::getenv("EMULATOR_ROUNDS");
  return count * (factor ? std::strtoull(factor, nullptr, 10) : 1);
}

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(generator_() % static_cast<uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  double normal() { return normal_(generator_); }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  std::mt19937_64 generator_;
  std::normal_distribution<double> normal_{0, 1};
};

}  // namespace torch_fastdet::core
