// Cut the work list of multi_tensor.h on the host. These are pure functions that need no device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/common/host_device.h"
#include "core/multi_tensor/multi_tensor.h"

namespace torch_fastdet::core {

// Return how many elements a segment holds for rows of `total` elements together: a multiple of kSegmentElements.
inline int64_t segment_elements(int64_t total) {
  const int64_t unit = kSegmentElements;
  const int64_t needed = ceil_div(total / kMaxSegments, unit) * unit;
  return std::max(unit, needed);
}

// Cut rows of these sizes into segments, in order. Rows without elements get none.
inline std::vector<Segment> plan_segments(const std::vector<int64_t>& numels) {
  int64_t total = 0;
  for (const int64_t numel : numels) total += numel;
  const int64_t length = segment_elements(total);
  std::vector<Segment> segments;
  segments.reserve(static_cast<size_t>(total / length) + numels.size());
  for (size_t row = 0; row < numels.size(); ++row) {
    for (int64_t start = 0; start < numels[row]; start += length) {
      const int64_t count = std::min(length, numels[row] - start);
      segments.push_back({start, static_cast<int32_t>(row), static_cast<int32_t>(count)});
    }
  }
  return segments;
}

// Fill `layout` for strides of one shape (null: no tensor), merging dimensions. Return false if kMaxDims are too few.
inline bool merge_dims(Layout& layout, int64_t dims, const int64_t* sizes, const int64_t* const strides[kSlots]) {
  layout = Layout{};
  for (int64_t dim = 0; dim < dims; ++dim) {
    if (sizes[dim] == 1) continue;
    bool together = layout.dims > 0;
    for (int slot = 0; slot < kSlots && together; ++slot) {
      together = !strides[slot] || layout.strides[slot][layout.dims - 1] == strides[slot][dim] * sizes[dim];
    }
    if (!together && layout.dims == kMaxDims) return false;
    const int64_t at = together ? layout.dims - 1 : layout.dims++;
    layout.sizes[at] = together ? layout.sizes[at] * sizes[dim] : sizes[dim];
    for (int slot = 0; slot < kSlots; ++slot) {
      if (strides[slot]) layout.strides[slot][at] = strides[slot][dim];
    }
  }
  return true;
}

// Compute the offset (in elements) of a row's element `index` in each of its tensors.
TORCH_FASTDET_HOST_DEVICE void layout_offsets(const Layout& layout, int64_t index, int64_t offsets[kSlots]) {
  for (int slot = 0; slot < kSlots; ++slot) offsets[slot] = 0;
  for (int64_t dim = layout.dims - 1; dim >= 0; --dim) {
    const int64_t at = index % layout.sizes[dim];
    index /= layout.sizes[dim];
    for (int slot = 0; slot < kSlots; ++slot) offsets[slot] += at * layout.strides[slot][dim];
  }
}

}  // namespace torch_fastdet::core
