// Check rows of targets on the CPU, where a bad row raises at once.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

namespace torch_fastdet {

// Return the number of valid rows of targets. If `num_targets` is null, all rows are valid.
inline int64_t targets_in_use(const int64_t* num_targets, int64_t rows, const char* op) {
  if (!num_targets) return rows;
  TORCH_CHECK_VALUE(*num_targets >= 0 && *num_targets <= rows, op, ": num_targets is ", *num_targets,
                    ", but targets has ", rows, " rows");
  return *num_targets;
}

// Raise if fault(row) is not 0 for one of the first `count` rows; it is the bad column, counted from 1.
template <typename Row, typename Fault>
void check_target_rows(int64_t count, int64_t images, int64_t classes, const char* op, const Row& row_at,
                       const Fault& fault_of) {
  static constexpr const char* kWanted[] = {"an image index of the batch", "a class index below the number of classes",
                                            "a finite number"};
  static constexpr const char* kColumns[] = {"image", "class", "x", "y", "w", "h"};
  for (int64_t i = 0; i < count; ++i) {
    const float* row = row_at(i);
    const int fault = fault_of(row, images, classes);
    TORCH_CHECK_VALUE(fault == 0, op, ": targets row ", i, ", column ", fault - 1, " (", kColumns[fault - 1], ") is ",
                      row[fault - 1], ", but ", kWanted[std::min(fault - 1, 2)], " is expected (batch ", images, ", ",
                      classes, " classes)");
  }
}

}  // namespace torch_fastdet
