// Compute cv2.resize on the CPU, one target row at a time. The work for the columns is done once per image, and a
// source row that is blended along its columns serves every target row that uses it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/image/resize_math.h"

namespace torch_fastdet::core {

// Hold a column's two source pixels, as offsets in a row, and their weights next to each other.
struct ColumnTap {
  int first, second;
  int16_t first_weight, second_weight;
};

// Describe a source row of `width` pixels of three channels, and how far after it the next row to be read lies.
struct ColumnRow {
  const uint8_t* data;
  int width;
  int64_t next;
};

// An instruction set may replace these two steps of kLinear.
struct ResizeKernels {
  // Apply blend_columns() to a row.
  void (*columns3)(const ColumnRow& row, const ColumnTap* taps, int count, int16_t* out);
  // Apply blend_rows() to two rows of such values.
  void (*rows)(const int16_t* top, const int16_t* bottom, int top_weight, int bottom_weight, uint8_t* out,
               int64_t count);
};

template <int kChannels>
void blend_columns_span(const uint8_t* row, const ColumnTap* taps, int begin, int end, int16_t* out) {
  for (int x = begin; x < end; ++x) {
    const ColumnTap& tap = taps[x];
    for (int c = 0; c < kChannels; ++c) {
      out[x * kChannels + c] = static_cast<int16_t>(
          blend_columns(row[tap.first + c], row[tap.second + c], tap.first_weight, tap.second_weight));
    }
  }
}

inline void blend_columns3(const ColumnRow& row, const ColumnTap* taps, int count, int16_t* out) {
  blend_columns_span<3>(row.data, taps, 0, count, out);
}

inline void blend_rows_span(const int16_t* top, const int16_t* bottom, int top_weight, int bottom_weight, uint8_t* out,
                            int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    out[i] = static_cast<uint8_t>(blend_rows(top[i], bottom[i], top_weight, bottom_weight));
  }
}

inline void blend_rows_plain(const int16_t* top, const int16_t* bottom, int top_weight, int bottom_weight, uint8_t* out,
                             int64_t count) {
  blend_rows_span(top, bottom, top_weight, bottom_weight, out, 0, count);
}

inline ResizeKernels plain_resize_kernels() {
  return {blend_columns3, blend_rows_plain};
}

template <int kChannels>
class ResizeRows {
 public:
  ResizeRows(const uint8_t* source, int64_t pitch, const Resize& resize, const ResizeKernels& kernels)
      : source_(source), pitch_(pitch), resize_(resize), kernels_(kernels) {
    const int width = resize.x.target;
    if (is_linear()) {
      for (int x = 0; x < width; ++x) {
        const LinearTap tap = linear_tap(resize.x, x, true, resize.rule == ResizeRule::kLinearArea);
        taps_.push_back({tap.first * kChannels, tap.second * kChannels, static_cast<int16_t>(tap.first_weight),
                         static_cast<int16_t>(tap.second_weight)});
      }
      for (auto& blended : blended_) blended.resize(static_cast<size_t>(width) * kChannels);
    } else if (resize.rule == ResizeRule::kArea) {
      for (int x = 0; x < width; ++x) area_taps_.push_back(area_tap(resize.x, x));
      totals_.resize(static_cast<size_t>(width) * kChannels);
    }
  }

  // Compute target row y, which has target width * kChannels bytes. Rows in ascending order share most of the work.
  void row(int y, uint8_t* out) {
    if (resize_.rule == ResizeRule::kCopy) {
      std::memcpy(out, source_ + y * pitch_, static_cast<size_t>(resize_.x.target) * kChannels);
    } else if (resize_.rule == ResizeRule::kBlocks) {
      blocks_row(y, out);
    } else if (resize_.rule == ResizeRule::kArea) {
      area_row(y, out);
    } else {
      linear_row(y, out);
    }
  }

 private:
  bool is_linear() const { return resize_.rule == ResizeRule::kLinear || resize_.rule == ResizeRule::kLinearArea; }

  void linear_row(int y, uint8_t* out) {
    const LinearTap tap = linear_tap(resize_.y, y, false, resize_.rule == ResizeRule::kLinearArea);
    const int top = columns_of(tap.first, tap.second), bottom = columns_of(tap.second, tap.first);
    kernels_.rows(blended_[top].data(), blended_[bottom].data(), tap.first_weight, tap.second_weight, out,
                  static_cast<int64_t>(resize_.x.target) * kChannels);
  }

  // Return the buffer that holds source row `y`, without evicting `keep`, the other row of the pair.
  int columns_of(int y, int keep) {
    for (int i = 0; i < 2; ++i) {
      if (held_[i] == y) return i;
    }
    const int slot = held_[0] == keep ? 1 : 0;
    const uint8_t* from = source_ + y * pitch_;
    int16_t* to = blended_[slot].data();
    if (kChannels == 3) {
      const int64_t rows = std::max<int64_t>(1, std::llrint(resize_.y.scale));
      kernels_.columns3({from, resize_.x.source, rows * pitch_}, taps_.data(), resize_.x.target, to);
    } else {
      blend_columns_span<kChannels>(from, taps_.data(), 0, resize_.x.target, to);
    }
    held_[slot] = y;
    return slot;
  }

  void blocks_row(int y, uint8_t* out) {
    const int w = resize_.x.source / resize_.x.target, h = resize_.y.source / resize_.y.target;
    const uint8_t* from = source_ + static_cast<int64_t>(y) * h * pitch_;
    if (w == 2 && h == 2) {
      const uint8_t* below = from + pitch_;
      for (int x = 0; x < resize_.x.target; ++x, from += 2 * kChannels, below += 2 * kChannels) {
        for (int c = 0; c < kChannels; ++c) {
          *out++ = static_cast<uint8_t>((from[c] + from[c + kChannels] + below[c] + below[c + kChannels] + 2) >> 2);
        }
      }
      return;
    }
    const float share = 1.f / static_cast<float>(w * h);
    for (int x = 0; x < resize_.x.target; ++x) {
      for (int c = 0; c < kChannels; ++c) {
        int sum = 0;
        for (int j = 0; j < h; ++j) {
          const uint8_t* at = from + j * pitch_ + static_cast<int64_t>(x) * w * kChannels + c;
          for (int i = 0; i < w; ++i) sum += at[i * kChannels];
        }
        *out++ = static_cast<uint8_t>(saturate_level(static_cast<float>(sum) * share));
      }
    }
  }

  void area_row(int y, uint8_t* out) {
    const AreaTap rows = area_tap(resize_.y, y);
    std::fill(totals_.begin(), totals_.end(), 0.f);
    for (int j = rows.first; j <= rows.last; ++j) {
      const uint8_t* from = source_ + j * pitch_;
      const float weight = rows.at(j);
      float* total = totals_.data();
      for (const AreaTap& tap : area_taps_) {
        float sum[kChannels] = {};
        for (int i = tap.first; i <= tap.last; ++i) {
          const float share = tap.at(i);
          for (int c = 0; c < kChannels; ++c) {
            sum[c] += static_cast<float>(from[static_cast<int64_t>(i) * kChannels + c]) * share;
          }
        }
        for (int c = 0; c < kChannels; ++c) *total++ += weight * sum[c];
      }
    }
    for (const float total : totals_) *out++ = static_cast<uint8_t>(saturate_level(total));
  }

  const uint8_t* source_;
  const int64_t pitch_;
  const Resize resize_;
  const ResizeKernels kernels_;
  std::vector<ColumnTap> taps_;
  std::vector<AreaTap> area_taps_;
  std::vector<int16_t> blended_[2];
  std::vector<float> totals_;
  int held_[2] = {-1, -1};
};

}  // namespace torch_fastdet::core
