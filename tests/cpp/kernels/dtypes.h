// Draw random problems of one type of values after the other.
#pragma once

#include <gtest/gtest.h>

#include "core/common/dtype.h"
#include "random.h"

namespace torch_fastdet::core {

// Call check(zero, seed, dtype) for these types in turn; zero has the type of sums.
template <class Check>
void for_each_seed(uint64_t count, std::initializer_list<DType> dtypes, const Check& check) {
  for (uint64_t seed = 0; seed < rounds(count) && !testing::Test::HasFailure(); ++seed) {
    const DType dtype = dtypes.begin()[seed % dtypes.size()];
    if (dtype == DType::kFloat64) {
      check(double{}, seed, dtype);
    } else {
      check(float{}, seed, dtype);
    }
  }
}

constexpr std::initializer_list<DType> kEveryDtype{DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

}  // namespace torch_fastdet::core
