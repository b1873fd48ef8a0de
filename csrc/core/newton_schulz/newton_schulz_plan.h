// Plan where matrices lie in the workspace, and the blocks that work on them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/common/host_device.h"
#include "core/newton_schulz/newton_schulz.h"

namespace torch_fastdet::core {

TORCH_FASTDET_HOST_DEVICE int64_t ns_round_up(int64_t value, int64_t unit) {
  return ceil_div(value, unit) * unit;
}

// Return the rows and columns of a matrix in the workspace, without padding.
TORCH_FASTDET_HOST_DEVICE int64_t ns_short(const NsMatrix& matrix) {
  return matrix.rows < matrix.columns ? matrix.rows : matrix.columns;
}
TORCH_FASTDET_HOST_DEVICE int64_t ns_long(const NsMatrix& matrix) {
  return matrix.rows < matrix.columns ? matrix.columns : matrix.rows;
}

// Return them with padding.
TORCH_FASTDET_HOST_DEVICE int64_t ns_height(const NsMatrix& matrix) {
  return ns_round_up(ns_short(matrix), kNsTile);
}
TORCH_FASTDET_HOST_DEVICE int64_t ns_width(const NsMatrix& matrix) {
  return ns_round_up(ns_long(matrix), kNsWide);
}

struct NsPlan {
  std::vector<NsMatrix> matrices;
  std::vector<NsTile> chunks, squares, tiles;
  int64_t source_elements = 0, x_elements = 0, gram_elements = 0;

  void add(int64_t rows, int64_t columns, double scale) {
    NsMatrix matrix{source_elements,
                    x_elements,
                    gram_elements,
                    static_cast<int32_t>(rows),
                    static_cast<int32_t>(columns),
                    static_cast<int32_t>(chunks.size()),
                    static_cast<int32_t>(ceil_div(rows * columns, kNsChunk)),
                    static_cast<float>(scale),
                    0};
    const auto index = static_cast<int32_t>(matrices.size());
    const auto height = static_cast<int32_t>(ns_height(matrix) / kNsTile);
    const auto width = static_cast<int32_t>(ns_width(matrix) / kNsWide);
    for (int32_t i = 0; i < matrix.chunks; ++i) chunks.push_back({index, i, 0});
    for (int32_t row = 0; row < height; ++row) {
      for (int32_t column = row; column < height; ++column) squares.push_back({index, row, column});
    }
    for (int32_t row = 0; row < ceil_div(ns_height(matrix), kNsTall); ++row) {
      for (int32_t column = 0; column < width; ++column) tiles.push_back({index, row, column});
    }
    matrices.push_back(matrix);
    source_elements += ns_round_up(rows * columns, kNsAlignment);
    x_elements += ns_height(matrix) * ns_width(matrix);
    gram_elements += ns_height(matrix) * ns_height(matrix);
  }

  // Sort the longest sums first, so that none of them begins when all others have ended.
  void sort() {
    const auto by = [this](auto length) {
      return [this, length](const NsTile& a, const NsTile& b) {
        return length(matrices[a.matrix]) > length(matrices[b.matrix]);
      };
    };
    std::stable_sort(squares.begin(), squares.end(), by(ns_long));
    std::stable_sort(tiles.begin(), tiles.end(), by(ns_short));
  }
};

}  // namespace torch_fastdet::core
