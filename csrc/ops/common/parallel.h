// Wrap at::parallel_for for the core's loops: parallel_for(begin, end, grain, f) calls f(begin, end).
#pragma once

#include <ATen/Parallel.h>

namespace torch_fastdet {

constexpr auto parallel_for = [](int64_t begin, int64_t end, int64_t grain, const auto& f) {
  at::parallel_for(begin, end, grain, f);
};

}  // namespace torch_fastdet
