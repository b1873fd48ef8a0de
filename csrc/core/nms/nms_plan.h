// Compute on the host the memory that a suppression on the GPU needs and the kernels that it launches.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/common/host_device.h"
#include "core/nms/nms.h"

namespace torch_fastdet::core {

constexpr int kHistogramBits = 11;
constexpr int kHistogramBins = 1 << kHistogramBits;
constexpr int kMaxCutLevels = 12;
// One block keeps its list in shared memory up to this many detections per image.
constexpr int64_t kSharedDetections = 1024;
// A block merges at most this many sorted runs while it suppresses.
constexpr int kMergedRuns = 16;
// This many candidates are decided together if the kept list is in device memory.
constexpr int64_t kWideChunk = 2048;
// The suppressing block itself sorts an image of at most this many candidates.
constexpr int64_t kSelfSorted = 1024;
// An image with at most this many candidates is never cut before the sort.
constexpr int64_t kUncutCandidates = 32768;

// One block sorts this many keys. The key of a float64 confidence is wide.
constexpr int nms_tile(bool wide_key) {
  return wide_key ? 2048 : 4096;
}
constexpr int nms_chunk(bool wide_key) {
  return wide_key ? 256 : 512;
}

// A level is one digit of the radix search for the cut: bits [shift, shift + width), below the prefix at parent_shift.
struct CutLevel {
  int32_t parent_shift, shift, width;
};

// Each piece of the workspace begins at these bytes. [0, zeroed) must be zero before the first kernel.
struct NmsOffsets {
  size_t found = 0, gathered = 0, tickets = 0, cut_states = 0, histogram = 0;
  size_t kept_count = 0, suppressed = 0, overlapped = 0, zeroed = 0;
  size_t promoted = 0, keys = 0, other_keys = 0, boxes = 0, classes = 0, masks = 0;
  size_t kept_boxes = 0, kept_classes = 0, kept_positions = 0;
  size_t bytes = 0;
};

struct NmsPlan : NmsOffsets {
  int64_t images = 0;
  int64_t possible = 0;     // most candidates of an image
  int64_t capacity = 0;     // keys that fit in an image's buffer
  int64_t tile = 0;         // keys that one block sorts
  int64_t runs = 0;         // most sorted runs of an image
  int64_t merges = 0;       // passes that double the length of the runs
  int64_t merged_runs = 0;  // runs after these passes
  bool cuts = false;        // more candidates may pass than fit
  bool wide = false;        // the kept list lies in device memory
  int64_t kept = 0;         // most detections of an image
  RotatedRule rotated = RotatedRule::kNone;
  int32_t levels = 0;
  CutLevel level[kMaxCutLevels] = {};
};

// Return the shared memory of a suppressing block: kept list, and runs with merged lists or a chunk's bit matrix.
inline int64_t suppress_shared_bytes(bool wide_key, int64_t runs) {
  const int64_t box = wide_key ? 32 : 16, key = wide_key ? 16 : 8, chunk = nms_chunk(wide_key);
  const int64_t lists = runs > 1 ? runs + (runs + 1) / 2 + (runs + 3) / 4 : 0;
  const int64_t kept = kSharedDetections * (box + 4);
  const int64_t matrix = chunk * (box + 4) + chunk / 32 * chunk * 4;
  return kept + std::max(matrix, lists * chunk * key) + 1024;
}

// Set the digits by which an image's cut is searched, highest first: those of the confidence, then of the index.
inline void plan_cut(NmsPlan& plan, bool wide_key, int64_t pairs) {
  int32_t index_bits = 1;
  while ((pairs - 1) >> index_bits) ++index_bits;
  int32_t top = 32 + (wide_key ? 63 : 31), parent = top;
  const auto add = [&](int32_t bottom) {
    while (top > bottom) {
      const int32_t width = std::min(kHistogramBits, top - bottom);
      plan.level[plan.levels++] = {parent, top - width, width};
      top -= width;
      parent = top;
    }
  };
  add(32);
  top = index_bits;  // the bits between are zero in every key
  add(0);
}

inline void plan_workspace(NmsPlan& plan, bool wide_key, bool has_labels) {
  size_t at = 0;
  const auto take = [&](size_t bytes) {
    const size_t offset = at;
    at = (at + bytes + 255) / 256 * 256;
    return offset;
  };
  const bool rotated = plan.rotated != RotatedRule::kNone, fast = plan.rotated == RotatedRule::kFast;
  const size_t key = wide_key ? 16 : 8, box = (wide_key ? 32 : 16) * (rotated ? 2 : 1);
  const size_t images = static_cast<size_t>(plan.images), capacity = static_cast<size_t>(plan.capacity);
  plan.found = take(images * 4);
  plan.gathered = take(images * 4);
  if (plan.cuts) {
    plan.tickets = take(images * plan.levels * 4);
    plan.cut_states = take(images * 32);
    plan.histogram = take(images * kHistogramBins * 4);
  }
  if (plan.wide) {
    plan.kept_count = take(images * 4);
    plan.suppressed = take(images * kWideChunk / 8);
    plan.overlapped = take(images * kWideChunk / 8);
  }
  plan.zeroed = at;
  if (has_labels) plan.promoted = take(images);
  plan.keys = take(images * capacity * key);
  if (plan.merges) plan.other_keys = take(images * capacity * key);
  if (plan.wide) {
    plan.boxes = take(images * capacity * box);
    plan.classes = take(images * capacity * 4);
    plan.kept_positions = take(images * static_cast<size_t>(plan.kept) * 4);
    if (!fast) {
      plan.kept_boxes = take(images * static_cast<size_t>(plan.kept) * box);
      plan.kept_classes = take(images * static_cast<size_t>(plan.kept) * 4);
      plan.masks = take(images * kWideChunk * kWideChunk / 8);
    }
  }
  plan.bytes = at;
}

// `shared_limit` is the shared memory in bytes that a block of this device may use.
inline NmsPlan plan_nms(const CandidateSource& source, const NmsOptions& options, int64_t shared_limit) {
  const bool wide_key = source.dtype == DType::kFloat64;
  NmsPlan plan;
  plan.images = source.images;
  const int64_t rows = source.anchors + source.label_count;
  plan.possible = options.multi_label ? rows * source.classes : (source.classes ? rows : 0);
  plan.tile = nms_tile(wide_key);
  const int64_t wanted = std::min(options.max_candidates, plan.possible);  // the greatest integer means "all"
  const int64_t roomy = (wanted / 16 * 17 + plan.tile) / plan.tile * plan.tile;
  plan.capacity = std::min(plan.possible, std::max(kUncutCandidates, roomy));
  plan.cuts = plan.possible > plan.capacity;
  plan.runs = ceil_div(plan.capacity, plan.tile);
  plan.kept = std::min({options.max_detections, options.max_candidates, plan.possible});
  plan.rotated = options.rotated;
  plan.wide = plan.kept > kSharedDetections || options.rotated != RotatedRule::kNone;
  plan.merged_runs = plan.runs;
  const auto mergeable = [&](int64_t runs) {
    return runs <= kMergedRuns && suppress_shared_bytes(wide_key, runs) <= shared_limit;
  };
  while (plan.merged_runs > 1 && (plan.wide || !mergeable(plan.merged_runs))) {
    plan.merged_runs = (plan.merged_runs + 1) / 2;
    ++plan.merges;
  }
  if (plan.cuts) plan_cut(plan, wide_key, rows * source.classes);
  plan_workspace(plan, wide_key, source.label_count > 0);
  return plan;
}

}  // namespace torch_fastdet::core
