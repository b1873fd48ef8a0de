// One launch over a list of tensors: the work list and what the two kernels take.
//
// A row is one parameter (or one buffer that only the moving average knows) with up to five tensors of one shape. A
// segment is a piece of a row that one warp handles; eight consecutive segments are a block's chunk of up to 8,192
// elements, in which tiny tensors lie packed. Rows and segments live in device memory, so a launch takes any number of
// tensors and a captured graph replays with the pointers that it was captured with.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"

namespace torch_fastdet::core {

// kMomentum: Adam's first moment. kSecond: its second; for kMovedSgd an extra direction; for Muon what to
// orthogonalise.
enum Slot : int { kParam = 0, kGrad = 1, kMomentum = 2, kAverage = 3, kSecond = 4, kSlots = 5 };

constexpr int kSegmentElements = 1024;
constexpr int kWarpsPerBlock = 8;
constexpr int64_t kMaxSegments = int64_t(1) << 18;  // beyond it, segments grow instead
constexpr int kMaxDims = 8;
constexpr int kMaxBlocks = 2048;
constexpr int kMaxGroups = 24;

struct Row {
  void* data[kSlots];  // null: the row has no such tensor
  int64_t numel;
  float* step;       // Adam: the number of steps taken, in device memory; null: the row takes none
  int32_t group;     // index of its Group; -1: moving average only
  int32_t layout;    // index into layouts, or -1: all tensors lie alike in dense memory
  uint8_t dtype[8];  // DType of each slot
};

// Sizes and strides (elements) of a row whose tensors lie differently; dimensions that can be merged are.
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

// A scalar in device memory where `data` is set, else by value.
struct Scalar {
  const void* data;
  double value;
  DType dtype;
};

// Rules: none; torch.optim.SGD; it after a move along kSecond; Adam and AdamW; Muon, which changes momentum alone.
enum class Rule : int32_t { kNone, kSgd, kMovedSgd, kAdam, kMuon };

// A group's numbers. Adam: momentum and dampening are betas, last is eps; kMovedSgd: last is the way along kSecond.
struct Group {
  Scalar lr, momentum, dampening, weight_decay, last;
  int32_t nesterov, maximize;
  int32_t decoupled;  // AdamW: weight decay beside the gradient
};

// The results of the reduction, for the update. All zero before first use; kernels leave ticket and nonfinite zero.
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
  bool float32_only;  // every tensor is float32 and no row has a layout: the fast kernel
  int multiprocessors;
};

// First launch: are all gradients finite, what is their norm. Sums in a fixed order.
struct ReduceParams {
  MultiTensor list;
  const float* scale;     // gradients are multiplied by 1 / *scale first; null: they are not
  bool write_grads;       // store the multiplied gradients
  float* found_inf;       // 1 where a gradient is not finite; null: not wanted
  bool keep_found_inf;    // leave found_inf as it is where all are finite, else store 0
  bool skip_on_overflow;  // the update after this one shall leave parameters alone on overflow
  void* norm;             // L2 norm of the multiplied gradients; null: not wanted
  DType norm_dtype;       // float32, or float64
  bool clip;              // leave min(max_norm / (norm + 1e-6), 1) for the update
  double max_norm;
  float* new_scale;  // GradScaler.update() on these two; null: not wanted
  int32_t* growth_tracker;
  double growth_factor, backoff_factor;
  int32_t growth_interval;
};

// Second launch: gradients times factors, the optimizer's rule, moving average.
struct UpdateParams {
  MultiTensor list;
  bool use_workspace;       // inv_scale, clip and skip come from the reduction before
  const float* grad_scale;  // gradients are multiplied by 1 / *grad_scale; null: they are not
  const float* found_inf;   // parameters and gradients stay as they are where it is not zero; null: never
  bool write_grads;         // store the multiplied gradients
  Rule rule;
  int32_t first_group, num_groups;
  Group groups[kMaxGroups];  // of rows first_group .. first_group + num_groups - 1
  bool first_step;           // momentum buffers hold nothing yet
  uint8_t* unfilled;         // or, for each row: 1 until its momentum buffer holds something; null: all do
  bool ema;
  Scalar decay;
  double tau;       // > 0: the decay ramps with the number of updates
  int64_t updates;  // this update's number; -1: one more than *counter
  int64_t* counter;
  bool write_counter;  // store this update's number there
};

cudaError_t multi_tensor_reduce(const ReduceParams& params, cudaStream_t stream);
cudaError_t multi_tensor_update(const UpdateParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
