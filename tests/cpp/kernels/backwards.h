// The tests run the CPU's loops as one piece, or in pieces as small as allowed with the last one first, so that a loop
// fails if its result depends on the pieces or their order. Both have one type, for which the loops are compiled once.
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
