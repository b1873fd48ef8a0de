// Describe the raw outputs of a v8 head, with each anchor's logits and gradients, for CPU and CUDA.
#pragma once

#include <cstdint>

#include "core/common/dtype.h"
#include "core/common/storage.h"

namespace torch_fastdet::core {

constexpr int kV8MaxLevels = 8;

enum class V8Layout : int32_t {
  kPlanes,  // (bs, channels, anchors) contiguous
  kRows,    // (bs, anchors, channels) contiguous: channels_last
};

// In a tensor of raw outputs, channels below `box_channels` belong to the boxes (side, bin), the others to the classes.
struct V8Tensor {
  const void* logits;  // by the strides below, in elements; anchor a is in column a % width of row a / width
  void* gradient;      // dense, as `layout` says; null in the forward pass
  int64_t stride_b, stride_c, stride_y, stride_x;
  int64_t width;
  int64_t anchors;
  int32_t channels, box_channels;
  V8Layout layout;
  bool dense;  // the logits have this layout too
};

// Name the tensors that hold a level of the head, and its first anchor in each.
struct V8Level {
  int32_t boxes, classes;
  int64_t first_in_tensor;
  int64_t first;  // index of its first anchor among all levels
  int64_t nx, ny;
  float stride;  // pixels a cell
};

struct V8Heads {
  DType dtype;
  V8Tensor tensors[kV8MaxLevels];
  V8Level levels[kV8MaxLevels];
  int32_t num_tensors, num_levels;
  int32_t nc, reg_max;
  int64_t bs, anchors;     // anchors of all levels
  float image_w, image_h;  // pixels
};

TORCH_FASTDET_HOST_DEVICE int64_t v8_logit(const V8Tensor& tensor, int64_t b, int64_t anchor) {
  return b * tensor.stride_b + anchor / tensor.width * tensor.stride_y + anchor % tensor.width * tensor.stride_x;
}

TORCH_FASTDET_HOST_DEVICE int64_t v8_gradient(const V8Tensor& tensor, int64_t b, int64_t channel, int64_t anchor) {
  return tensor.layout == V8Layout::kPlanes ? (b * tensor.channels + channel) * tensor.anchors + anchor
                                            : (b * tensor.anchors + anchor) * tensor.channels + channel;
}

TORCH_FASTDET_HOST_DEVICE int64_t v8_gradient_step(const V8Tensor& tensor) {
  return tensor.layout == V8Layout::kPlanes ? tensor.anchors : 1;
}

struct V8Anchor {
  int32_t level;
  int64_t index, column, row;  // index: row * nx + column
};

TORCH_FASTDET_HOST_DEVICE V8Anchor v8_anchor(const V8Heads& heads, int64_t anchor) {
  V8Anchor at{0, 0, 0, 0};
  while (at.level + 1 < heads.num_levels && anchor >= heads.levels[at.level + 1].first) ++at.level;
  const V8Level& level = heads.levels[at.level];
  at.index = anchor - level.first;
  at.column = at.index % level.nx;
  at.row = at.index / level.nx;
  return at;
}

template <typename scalar_t>
struct V8Logits {
  const scalar_t* at;
  int64_t step;
  TORCH_FASTDET_HOST_DEVICE arithmetic_t<scalar_t> operator()(int i) const { return to_arithmetic(at[i * step]); }
};

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE V8Logits<scalar_t> side_logits(const V8Heads& heads, int64_t b, const V8Anchor& at,
                                                         int side) {
  const V8Level& level = heads.levels[at.level];
  const V8Tensor& tensor = heads.tensors[level.boxes];
  return {static_cast<const scalar_t*>(tensor.logits) + v8_logit(tensor, b, level.first_in_tensor + at.index) +
              side * heads.reg_max * tensor.stride_c,
          tensor.stride_c};
}

template <typename scalar_t>
TORCH_FASTDET_HOST_DEVICE arithmetic_t<scalar_t> class_logit(const V8Heads& heads, int64_t b, const V8Anchor& at,
                                                             int label) {
  const V8Level& level = heads.levels[at.level];
  const V8Tensor& tensor = heads.tensors[level.classes];
  return to_arithmetic(
      static_cast<const scalar_t*>(tensor.logits)[v8_logit(tensor, b, level.first_in_tensor + at.index) +
                                                  (tensor.box_channels + label) * tensor.stride_c]);
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE T class_weight(const void* weights, int label) {
  return weights ? static_cast<const T*>(weights)[label] : T(1);
}

// Return one cell as a share of the image's side along which `side` is measured.
template <typename T>
TORCH_FASTDET_HOST_DEVICE T cell_share(const V8Heads& heads, const V8Anchor& at, int side) {
  return T(heads.levels[at.level].stride) / T(side % 2 == 0 ? heads.image_w : heads.image_h);
}

}  // namespace torch_fastdet::core
