// How the tests share out the CPU's loops: in pieces as small as allowed, the last one first, so that a loop whose
// result depends on the pieces or on their order fails.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torch_fastdet::core {

constexpr auto backwards = [](int64_t begin, int64_t end, int64_t grain, const auto& f) {
  for (int64_t last = end; last > begin; last -= grain) f(std::max(begin, last - grain), last);
};

}  // namespace torch_fastdet::core
