// BatchNorm2d with the activation behind it on the GPU. In training two launches each way: the first reduces each
// channel over a block's positions into `partials`, the second adds up the partials of its channels and makes the
// result. No atomics: the order of every sum is fixed by the plan. In evaluation one launch.
#pragma once

#include "core/bn_act/bn_act_math.h"
#include "core/bn_act/bn_act_plan.h"
#include "core/common/cuda_api.h"
#include "core/common/dtype.h"

namespace torch_fastdet::core {

// A vector of C elements, or null.
struct BnActVector {
  void* data;
  DType dtype;
};

// x may hold channels of several norms, each with its own result: `parts` in order, each from its channel `first` on.
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
  DType dtype;  // of x, residual and y
  const void* x;
  BnActStrides x_strides;
  const void* residual;  // added to the activation's result where there is one part, or null
  BnActStrides residual_strides;
  int part_count;
  BnActForwardPart parts[kBnActMostParts];
  void *mean, *invstd;  // results, C elements of the arithmetic type (double for double)
  void* partials;       // 2 * plan.partials() elements of the arithmetic type
  double momentum, eps;
  Activation activation;
  double slope;  // of LeakyReLU
};

// In evaluation: (x - mean) / sqrt(variance + eps) * weight + bias, the activation of it, and the residual.
struct BnActEvalParams {
  BnActPlan plan;
  DType dtype;  // of x, residual, y and last
  const void* x;
  BnActStrides x_strides;
  const void* residual;  // or null
  BnActStrides residual_strides;
  void* y;  // may be x
  BnActStrides y_strides;
  void* last;  // the result's channels from `last_first` on once more, or null; may be x
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
  DType dtype;  // of x, grad_y and grad_x
  const void* x;
  BnActStrides x_strides;
  int part_count;
  BnActBackwardPart parts[kBnActMostParts];
  void* grad_x;
  BnActStrides grad_x_strides;
  const void *mean, *invstd;  // of the forward pass
  void* partials;             // 2 * plan.partials() elements of the arithmetic type
  Activation activation;
  double slope;
};

// Blocks that the current device runs at once: what make_bn_act_plan asks for.
cudaError_t bn_act_blocks(int64_t& blocks);

cudaError_t launch_bn_act_forward(const BnActForwardParams& params, cudaStream_t stream);
cudaError_t launch_bn_act_backward(const BnActBackwardParams& params, cudaStream_t stream);
cudaError_t launch_bn_act_eval(const BnActEvalParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
