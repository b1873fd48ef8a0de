// How the tests share out the CPU's loops: as one piece, or in pieces as small as allowed, the last one first, so that
// a loop whose result depends on the pieces or on their order fails. Both are of one type, for which loops are compiled
// once.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torch_fastdet::core {

struct Pieces {
  bool reversed;

  template <typename F>
  void operator()(int64_t begin, int64_t end, int64_t grain, const F& f) const {
    if (!reversed) return f(begin, end);
    for (int64_t last = end; last > begin; last -= grain) f(std::max(begin, last - grain), last);
  }
};
constexpr Pieces in_order{false}, backwards{true};

}  // namespace torch_fastdet::core
