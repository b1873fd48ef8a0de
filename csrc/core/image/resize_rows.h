// cv2.resize on the CPU, one target row at a time: what the columns need is worked out once a picture, and horizontal
// sums of a source row serve every target row that takes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/image/resize_math.h"

namespace torch_fastdet::core {

// What an instruction set may replace: the vertical step of kLinear.
using BlendRows = void (*)(const int* top, const int* bottom, int top_weight, int bottom_weight, uint8_t* out,
                           int64_t count);

TORCH_FASTDET_HOST_DEVICE void blend_row_values(const int* top, const int* bottom, int top_weight, int bottom_weight,
                                                uint8_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<uint8_t>(blend_rows(top[i], bottom[i], top_weight, bottom_weight));
  }
}

inline void blend_rows_plain(const int* top, const int* bottom, int top_weight, int bottom_weight, uint8_t* out,
                             int64_t count) {
  blend_row_values(top, bottom, top_weight, bottom_weight, out, count);
}

template <int kChannels>
class ResizeRows {
 public:
  ResizeRows(const uint8_t* source, int64_t pitch, const Resize& resize, BlendRows blend)
      : source_(source), pitch_(pitch), resize_(resize), blend_(blend) {
    const int width = resize.x.target;
    if (is_linear()) {
      for (int x = 0; x < width; ++x) {
        taps_.push_back(linear_tap(resize.x, x, true, resize.rule == ResizeRule::kLinearArea));
      }
      for (auto& sums : sums_) sums.resize(static_cast<size_t>(width) * kChannels);
    } else if (resize.rule == ResizeRule::kArea) {
      for (int x = 0; x < width; ++x) area_taps_.push_back(area_tap(resize.x, x));
      totals_.resize(static_cast<size_t>(width) * kChannels);
    }
  }

  // Target row y, target width * kChannels bytes. Rows in rising order share most work.
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
    const int top = sums_of(tap.first, tap.second), bottom = sums_of(tap.second, tap.first);
    blend_(sums_[top].data(), sums_[bottom].data(), tap.first_weight, tap.second_weight, out,
           static_cast<int64_t>(resize_.x.target) * kChannels);
  }

  // The buffer that holds source row `y`; `keep`, the other row of the pair, stays.
  int sums_of(int y, int keep) {
    for (int i = 0; i < 2; ++i) {
      if (held_[i] == y) return i;
    }
    const int slot = held_[0] == keep ? 1 : 0;
    const uint8_t* from = source_ + y * pitch_;
    int* to = sums_[slot].data();
    for (const LinearTap& tap : taps_) {
      const uint8_t *first = from + int64_t{tap.first} * kChannels, *second = from + int64_t{tap.second} * kChannels;
      for (int c = 0; c < kChannels; ++c) *to++ = first[c] * tap.first_weight + second[c] * tap.second_weight;
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
  const BlendRows blend_;
  std::vector<LinearTap> taps_;
  std::vector<AreaTap> area_taps_;
  std::vector<int> sums_[2];
  std::vector<float> totals_;
  int held_[2] = {-1, -1};
};

}  // namespace torch_fastdet::core
