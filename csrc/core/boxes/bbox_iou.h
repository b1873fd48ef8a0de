// Declare the launchers and parameters of bbox_iou and iou_loss. The arithmetic is in box_math.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/boxes/box_math.h"
#include "core/common/broadcast.h"
#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/common/host_device.h"

namespace torch_fastdet::core {

// Describe a tensor of boxes: four coordinates, `coord_stride` elements apart, for each row of a BroadcastPlan.
struct BoxesIn {
  const void* data;
  int64_t coord_stride;
  DType dtype;
  bool vectorised;  // one aligned vector holds all four coordinates of a row
};

struct IouConfig {
  IouKind kind;
  bool xywh;
  double eps;
};

// Call f with the kind as a compile-time constant and a zero of the arithmetic type.
template <typename F>
void with_kind(IouKind kind, const BoxesIn& box1, const BoxesIn& box2, F&& f) {
  const bool is_double = box1.dtype == DType::kFloat64 || box2.dtype == DType::kFloat64;
  const auto with_type = [&](auto constant) { is_double ? f(constant, double{}) : f(constant, float{}); };
  switch (kind) {
    case IouKind::kIou:
      return with_type(std::integral_constant<IouKind, IouKind::kIou>{});
    case IouKind::kGiou:
      return with_type(std::integral_constant<IouKind, IouKind::kGiou>{});
    case IouKind::kDiou:
      return with_type(std::integral_constant<IouKind, IouKind::kDiou>{});
    case IouKind::kCiou:
      return with_type(std::integral_constant<IouKind, IouKind::kCiou>{});
  }
}

enum class IouReduction : int32_t { kNone, kMean, kSum };

// Set out[i] to the iou of pair i, or to 1 - iou with `loss`. `out` is contiguous and of `out_dtype`.
struct BboxIouParams {
  BoxesIn box1, box2;
  BroadcastPlan<2> pairs;  // operands: box1, box2
  IouConfig config;
  bool loss;
  void* out;
  DType out_dtype;
};

// Write the mean or sum of 1 - iou to the single element of `out`.
struct IouLossParams {
  BoxesIn box1, box2;
  BroadcastPlan<2> pairs;
  IouConfig config;
  IouReduction reduction;
  void* partial;  // iou_loss_partials() values of the arithmetic type
  void* out;
  DType out_dtype;
};

// Only the pairs determine a loss's blocks, so that bits are the same on every GPU. A pair takes 250 instructions.
constexpr int64_t kLossMaxCluster = 8;
constexpr int64_t kLossClusterPairs = 65536;
constexpr int64_t kLossMaxBlocks = 1024;

inline int64_t iou_loss_blocks(int64_t pairs) {
  constexpr int64_t kSmallBlock = 256;
  constexpr int64_t kLargeBlock = 2048;
  const bool cluster = pairs <= kLossClusterPairs;
  const int64_t per_block = cluster ? kSmallBlock : kLargeBlock;
  const int64_t most = cluster ? kLossMaxCluster : kLossMaxBlocks;
  const int64_t blocks = pairs == 0 ? 1 : ceil_div(pairs, per_block);
  return blocks < most ? blocks : most;
}

// If the GPU has thread block clusters, up to kLossMaxCluster blocks combine their sums within the launch. Otherwise
// the blocks write this many sums to `partial`, and a second launch adds them in the same order.
inline int64_t iou_loss_partials(int64_t pairs, bool clusters) {
  const int64_t blocks = iou_loss_blocks(pairs);
  return blocks == 1 || (blocks <= kLossMaxCluster && clusters) ? 0 : blocks;
}

// A box tensor's gradient has contiguous rows. Row r sums the plan's pairs [r * reduce, (r + 1) * reduce).
struct IouGradPass {
  BroadcastPlan<3> pairs;  // operands: box1, box2, grad
  int64_t rows = 0;
  int64_t reduce = 1;
  void* grad1 = nullptr;  // null: not requested
  void* grad2 = nullptr;
};

// If neither tensor is broadcast, one pass writes both gradients. Otherwise each tensor has its own pass.
struct IouBackwardParams {
  BoxesIn box1, box2;
  IouConfig config;
  const void* grad;  // gradient of the result, with any strides (stored in the plans)
  DType grad_dtype;
  double grad_scale;  // 1 for the iou, -1 for its loss, -1/n for the mean
  int passes = 0;
  IouGradPass pass[2];
};

cudaError_t launch_bbox_iou(const BboxIouParams& params, cudaStream_t stream);
// Set whether the current device's loss kernel was compiled with clusters, which need compute capability 9.0.
cudaError_t iou_loss_clusters(bool& clusters);
cudaError_t launch_iou_loss(const IouLossParams& params, cudaStream_t stream);
cudaError_t launch_iou_backward(const IouBackwardParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
