// Run BatchNorm2d and the following activation on the GPU. Training takes two launches in each direction: the first
// reduces each channel over a block's positions into `partials`; the second adds up the partials of its channels and
// computes the result. There are no atomics: the plan fixes the order of every sum. Evaluation takes one launch.
#pragma once

#include "core/bn_act/bn_act_math.h"
#include "core/bn_act/bn_act_plan.h"
#include "core/common/cuda_api.h"
#include "core/common/dtype.h"

namespace torch_fastdet::core {

// Describe a vector of C elements. `data` may be null.
struct BnActVector {
  void* data;
  DType dtype;
};

// x may hold channels of several norms, each with its own result: `parts` are in order, and each begins at `first`.
struct BnActForwardPart {
  int64_t first;
  void* y;
  BnActStrides y_strides;
  BnActVector weight, bias;               // null: 1 and 0
  BnActVector running_mean, running_var;  // null: not tracked
  int64_t* num_batches_tracked;           // null: not counted
};

struct BnActForwardParams {
  BnActPlan plan;
  DType dtype;  // dtype of x, residual and y
  const void* x;
  BnActStrides x_strides;
  const void* residual;  // added to the activation's result if there is one part, or null
  BnActStrides residual_strides;
  int part_count;
  BnActForwardPart parts[kBnActMostParts];
  void *mean, *invstd;  // results, C elements of the arithmetic type (double for double)
  void* partials;       // 2 * plan.partials() elements of the arithmetic type
  double momentum, eps;
  Activation activation;
  double slope;  // slope of LeakyReLU
};

// Evaluation computes (x - mean) / sqrt(variance + eps) * weight + bias, then the activation, then adds the residual.
struct BnActEvalParams {
  BnActPlan plan;
  DType dtype;  // dtype of x, residual, y and last
  const void* x;
  BnActStrides x_strides;
  const void* residual;  // may be null
  BnActStrides residual_strides;
  void* y;  // may be x
  BnActStrides y_strides;
  void* last;  // a second copy of the result's channels from `last_first` on, or null; may be x
  BnActStrides last_strides;
  int64_t last_first;
  BnActVector weight, bias, mean, variance;  // null: 1, 0, 0 and 1 - eps
  double eps;
  Activation activation;
  double slope;
};

struct BnActBackwardPart {
  int64_t first;
  const void* grad_y;
  BnActStrides grad_y_strides;
  BnActVector weight, bias;            // null: 1 and 0
  BnActVector grad_weight, grad_bias;  // results, or null
};

struct BnActBackwardParams {
  BnActPlan plan;
  DType dtype;  // dtype of x, grad_y and grad_x
  const void* x;
  BnActStrides x_strides;
  int part_count;
  BnActBackwardPart parts[kBnActMostParts];
  void* grad_x;
  BnActStrides grad_x_strides;
  const void *mean, *invstd;  // from the forward pass
  void* partials;             // 2 * plan.partials() elements of the arithmetic type
  Activation activation;
  double slope;
};

// Return the number of blocks that the current device runs at once, as make_bn_act_plan expects it.
cudaError_t bn_act_blocks(int64_t& blocks);

cudaError_t launch_bn_act_forward(const BnActForwardParams& params, cudaStream_t stream);
cudaError_t launch_bn_act_backward(const BnActBackwardParams& params, cudaStream_t stream);
cudaError_t launch_bn_act_eval(const BnActEvalParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
