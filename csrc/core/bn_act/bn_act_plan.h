// Divide a (N, C, H, W) tensor among the blocks of bn_act: into slices of channels and splits of a slice's positions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/common/host_device.h"

namespace torch_fastdet::core {

constexpr int kBnActThreads = 256;
constexpr int kBnActMostSliceVectors = 16;
constexpr int kBnActMostParts = 4;     // norms that share a tensor
constexpr int kBnActEvalAccesses = 4;  // accesses of a thread in evaluation, if there are enough

// The plan covers a dense part of a tensor: an image has `extent` positions, and each holds `vector` elements that are
// accessed as one. In channels_last a position is a pixel, and a slice is slice_vectors * vector neighbouring channels.
// In NCHW a slice is one channel, and a position is `vector` neighbouring pixels of it.
struct BnActPlan {
  bool channels_last;
  int64_t batch, channels;
  int extent;                       // positions of an image
  int vector;                       // elements of an access
  int slice_vectors;                // adjacent accesses at one position: 1 in NCHW
  int slice_channels;               // channels of a slice: slice_vectors * vector, or 1
  int64_t slices;                   // the last may be short
  int splits;                       // blocks that share a slice
  int split_positions;              // least number of positions in a split
  int split_rest;                   // splits, from the first on, with one more position
  int rows;                         // positions that a block visits in one step
  int step_images, step_positions;  // the same as images and positions
  int groups;                       // threads of a block that share a channel's partial sums

  TORCH_FASTDET_HOST_DEVICE int64_t positions() const { return batch * extent; }
  TORCH_FASTDET_HOST_DEVICE int64_t split_begin(int split) const {
    return int64_t{split} * split_positions + (split < split_rest ? split : split_rest);
  }
  TORCH_FASTDET_HOST_DEVICE int split_size(int split) const { return split_positions + (split < split_rest); }
  // Return how many elements of one channel a position holds.
  TORCH_FASTDET_HOST_DEVICE int channel_elements() const { return channels_last ? 1 : vector; }
  TORCH_FASTDET_HOST_DEVICE int64_t count() const { return positions() * channel_elements(); }
  // Return the number of pairs of partial sums in the workspace.
  TORCH_FASTDET_HOST_DEVICE int64_t partials() const { return slices * splits * slice_channels; }
};

// Strides are in elements. A slice of a concatenation is a tensor with a larger pitch.
struct BnActStrides {
  int64_t image, position, channel;  // from one image, position, channel to the next
};

// Describe a tensor (N, C, H * W): its address, or null, and the elements between images, channels and pixels.
struct BnActImage {
  const void* data;
  int64_t image, channel, pixel;
};

// Return the elements of the widest access that is aligned for all of `images`: 16 bytes, or else one element. Vectors
// of C elements and `partials` are read one by one, and do not limit it.
inline int bn_act_vector(bool channels_last, int64_t channels, int64_t pixels, int element_bytes,
                         const std::vector<BnActImage>& images) {
  const int64_t wide = 16 / element_bytes;
  if ((channels_last ? channels : pixels) % wide) return 1;
  for (const BnActImage& at : images) {
    if (!at.data) continue;
    const int64_t along = channels_last ? at.channel : at.pixel, across = channels_last ? at.pixel : at.channel;
    if (reinterpret_cast<uintptr_t>(at.data) % 16 || along != 1 || across % wide || at.image % wide) return 1;
  }
  return static_cast<int>(wide);
}

// `vector` comes from bn_act_vector. `blocks` is how many blocks the device runs at once.
inline BnActPlan make_bn_act_plan(bool channels_last, int64_t batch, int64_t channels, int64_t pixels, int vector,
                                  int64_t blocks) {
  BnActPlan plan{};
  plan.channels_last = channels_last;
  plan.batch = batch;
  plan.channels = channels;
  plan.extent = static_cast<int>(channels_last ? pixels : pixels / vector);
  plan.vector = vector;
  plan.slice_vectors = 1;
  if (channels_last) {
    // Make slices at least a cache line wide if possible, and equally wide if the number of channels permits.
    const int64_t vectors = channels / vector;
    int64_t width = std::min<int64_t>(vectors, 8);
    if (vectors > 8) {
      for (int64_t candidate : {8, 16, 12, 10, 9, 14, 15, 11, 13, 7, 6, 5, 4}) {
        if (vectors % candidate == 0) {
          width = candidate;
          break;
        }
      }
    }
    plan.slice_vectors = static_cast<int>(width);
  }
  plan.slice_channels = channels_last ? plan.slice_vectors * vector : 1;
  plan.slices = std::max<int64_t>(1, (channels + plan.slice_channels - 1) / plan.slice_channels);
  plan.rows = kBnActThreads / plan.slice_vectors;
  plan.step_images = plan.rows / plan.extent;
  plan.step_positions = plan.rows % plan.extent;
  plan.groups = kBnActThreads / plan.slice_channels;
  // Give each thread of a block a position if there are enough, and keep the size of a split within 32 bits.
  const int64_t most = std::max<int64_t>(1, plan.positions() / plan.rows);
  const int64_t least = plan.positions() / (int64_t{1} << 30) + 1;
  plan.splits = static_cast<int>(std::max(least, std::clamp<int64_t>(blocks / plan.slices, 1, most)));
  plan.split_positions = static_cast<int>(plan.positions() / plan.splits);
  plan.split_rest = static_cast<int>(plan.positions() % plan.splits);
  return plan;
}

}  // namespace torch_fastdet::core
