// One launch updates a list of tensors. This file holds the work list and the parameters of the two kernels.
//
// A row is one parameter (or one buffer that only the moving average knows) with up to five tensors of one shape. A
// segment is a piece of a row that one warp handles. Eight consecutive segments are a block's chunk of up to 8,192
// elements, so tiny tensors share a chunk. Rows and segments live in device memory, so a launch takes any number of
// tensors and a captured graph replays with the pointers that it was captured with.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"

namespace torch_fastdet::core {

// kMomentum is Adam's first moment. kSecond is Adam's second moment, kMovedSgd's extra direction, or what Muon
// orthogonalizes.
enum Slot : int { kParam = 0, kGrad = 1, kMomentum = 2, kAverage = 3, kSecond = 4, kSlots = 5 };

constexpr int kSegmentElements = 1024;
constexpr int kWarpsPerBlock = 8;
constexpr int64_t kMaxSegments = int64_t(1) << 18;  // longer lists use larger segments
constexpr int kMaxDims = 8;
constexpr int kMaxBlocks = 2048;
constexpr int kMaxGroups = 24;

struct Row {
  void* data[kSlots];  // null: the row has no such tensor
  int64_t numel;
  float* step;       // Adam: the number of steps taken, in device memory; null: the row takes none
  int32_t group;     // index of its Group; -1: moving average only
  int32_t layout;    // index into layouts; -1: all tensors have the same dense layout
  uint8_t dtype[8];  // DType of each slot
};

// Hold sizes and strides (in elements) of a row whose tensors differ in layout. Dimensions are merged if possible.
struct Layout {
  int64_t dims;
  int64_t sizes[kMaxDims];
  int64_t strides[kSlots][kMaxDims];
};

struct Segment {
  int64_t start;
  int32_t row;
  int32_t count;
};

// A scalar is read from device memory if `data` is set, else it is `value`.
struct Scalar {
  const void* data;
  double value;
  DType dtype;
};

// kMovedSgd is SGD after a move along kSecond, kAdam is Adam and AdamW, and kMuon changes the momentum alone.
enum class Rule : int32_t { kNone, kSgd, kMovedSgd, kAdam, kMuon };

// For Adam, momentum and dampening are the betas and last is eps. For kMovedSgd, last is the distance along kSecond.
struct Group {
  Scalar lr, momentum, dampening, weight_decay, last;
  int32_t nesterov, maximize;
  int32_t decoupled;  // AdamW: weight decay apart from the gradient
};

// The reduction leaves its results here. All must be zero before first use; kernels reset ticket and nonfinite.
struct Workspace {
  uint32_t ticket;
  uint32_t nonfinite;
  int32_t skip;
  float inv_scale;
  double clip;  // the factor, exact in the type it was computed in
};

struct MultiTensor {
  const Row* rows;
  const Segment* segments;
  const Layout* layouts;
  int64_t num_rows;
  int64_t num_segments;
  Workspace* workspace;
  double* partials;   // kMaxBlocks
  bool float32_only;  // every tensor is float32 and no row has a layout: use the fast kernel
  int multiprocessors;
};

// The first launch checks that all gradients are finite and computes their norm, in a fixed order of summation.
struct ReduceParams {
  MultiTensor list;
  const float* scale;     // gradients are multiplied by 1 / *scale first; null: they are not
  bool write_grads;       // store the multiplied gradients
  float* found_inf;       // set to 1 if a gradient is not finite; null: not wanted
  bool keep_found_inf;    // do not change found_inf if all are finite, else store 0
  bool skip_on_overflow;  // the next update leaves the parameters unchanged on overflow
  void* norm;             // L2 norm of the multiplied gradients; null: not wanted
  DType norm_dtype;       // float32, or float64
  bool clip;              // compute min(max_norm / (norm + 1e-6), 1) for the update
  double max_norm;
  float* new_scale;  // apply GradScaler.update() to these two; null: not wanted
  int32_t* growth_tracker;
  double growth_factor, backoff_factor;
  int32_t growth_interval;
};

// The second launch multiplies gradients by their factors, applies the rule and updates the moving average.
struct UpdateParams {
  MultiTensor list;
  bool use_workspace;       // take inv_scale, clip and skip from the preceding reduction
  const float* grad_scale;  // gradients are multiplied by 1 / *grad_scale; null: they are not
  const float* found_inf;   // leave parameters and gradients unchanged if it is not zero; null: never
  bool write_grads;         // store the multiplied gradients
  Rule rule;
  int32_t first_group, num_groups;
  Group groups[kMaxGroups];  // of rows first_group .. first_group + num_groups - 1
  bool first_step;           // no momentum buffer is initialized yet
  uint8_t* unfilled;         // or 1 for each row whose momentum buffer is not initialized yet; null: all are
  bool ema;
  Scalar decay;
  double tau;       // > 0: the decay ramps up with the number of updates
  int64_t updates;  // this update's number; -1: one more than *counter
  int64_t* counter;
  bool write_counter;  // store this update's number there
};

cudaError_t multi_tensor_reduce(const ReduceParams& params, cudaStream_t stream);
cudaError_t multi_tensor_update(const UpdateParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
