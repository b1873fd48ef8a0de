// Compute the backward pass of a v8 loss: all gradients as if there were no targets, then those of anchors in slots.
#include "core/v8_loss/v8_loss_device.cuh"
#include "core/v8_loss/v8_loss_launch.h"

namespace torch_fastdet::core {
namespace {

template <typename T>
__device__ T gradient_scale(const V8LossBackwardParams& params, int part) {
  return static_cast<const T*>(params.grad_loss)[part * params.grad_stride] *
         static_cast<const T*>(params.slots.scales)[part];
}

// Write every gradient as if there were no targets: sigmoids for the classes, zeros for the boxes.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) dense_kernel(const __grid_constant__ V8LossBackwardParams params) {
  using T = arithmetic_t<scalar_t>;
  using Pack = Vector<scalar_t>;
  const V8Heads& heads = params.heads;
  int64_t piece = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  int which = 0;
  for (; which < heads.num_tensors; ++which) {
    const int64_t pieces = gradient_pieces(heads.tensors[which], heads.bs);
    if (piece < pieces) break;
    piece -= pieces;
  }
  if (which == heads.num_tensors) return;
  const V8Tensor& tensor = heads.tensors[which];
  const auto* logits = static_cast<const scalar_t*>(tensor.logits);
  auto* gradient = static_cast<scalar_t*>(tensor.gradient);
  const void* weights = params.class_weights;
  const int boxes = tensor.box_channels;
  const T scale = gradient_scale<T>(params, 1);
  const scalar_t zero = from_arithmetic<scalar_t>(0);
  visit_piece<Pack::kSize>(
      tensor, piece, 0, heads.bs * tensor.anchors * tensor.channels,
      [&](int64_t e, int channel) {
        Pack pack;
        if (channel < boxes) {
#pragma unroll
          for (int i = 0; i < Pack::kSize; ++i) pack.x[i] = zero;
        } else {
          pack = *reinterpret_cast<const Pack*>(logits + e);
          const int next = tensor.layout == V8Layout::kRows ? 1 : 0;
#pragma unroll
          for (int i = 0; i < Pack::kSize; ++i) {
            const T weighted = weights ? scale * class_weight<T>(weights, channel - boxes + i * next) : scale;
            pack.x[i] = from_arithmetic<scalar_t>(sigmoid(to_arithmetic(pack.x[i])) * weighted);
          }
        }
        *reinterpret_cast<Pack*>(gradient + e) = pack;
      },
      [&](int64_t e, int channel) {
        if (channel < boxes) {
          gradient[e] = zero;
          return;
        }
        const T logit = to_arithmetic(logits[logit_of_element(tensor, e, channel)]);
        gradient[e] = from_arithmetic<scalar_t>(sigmoid(logit) * scale * class_weight<T>(weights, channel - boxes));
      });
}

template <typename scalar_t>
__global__ void __launch_bounds__(kTermThreads)
    slot_gradient_kernel(const __grid_constant__ V8LossBackwardParams params) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const int side = threadIdx.x % kSides;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kTermSlots + threadIdx.x / kSides;
  const int64_t anchor = slot < params.n * params.topk ? params.slots.anchor[slot] : -1;
  V8Anchor at{};
  V8Target target{};
  V8Side<T> mine{};
  int64_t image = 0;
  if (anchor >= 0) {
    image = anchor / heads.anchors;
    at = v8_anchor(heads, anchor % heads.anchors);
    v8_target(params.targets + 6 * params.slots.row[slot], heads.image_w, heads.image_h, {}, heads.nc, target);
    mine = v8_side<T>(heads.reg_max, side_logits<scalar_t>(heads, image, at, side));
  }
  T distance[kSides], by_distance[kSides];
  exchange_sides(mine.distance, distance);
  if (anchor < 0) return;
  const V8Pair<T> pair = v8_pair(target, at.column, at.row, T(heads.levels[at.level].stride));
  v8_box_term(pair, distance, by_distance);
  const T score = static_cast<const T*>(params.slots.score)[slot];
  const T by_side = (side == 0   ? by_distance[0]
                     : side == 1 ? by_distance[1]
                     : side == 2 ? by_distance[2]
                                 : by_distance[3]) *
                    (score * gradient_scale<T>(params, 0));
  v8_write_side<scalar_t>(heads, image, at, side, mine, v8_wanted_distance(pair, side), by_side,
                          score * gradient_scale<T>(params, 2));
  if (side == 0) v8_write_class<scalar_t>(params, image, at, target.label, score, gradient_scale<T>(params, 1));
}

}  // namespace

cudaError_t launch_v8_dense(const V8LossBackwardParams& params, cudaStream_t stream) {
  return dispatch(params.heads.dtype, [&](auto zero) {
    int64_t pieces = 0;
    for (int t = 0; t < params.heads.num_tensors; ++t) {
      pieces += gradient_pieces(params.heads.tensors[t], params.heads.bs);
    }
    dense_kernel<decltype(zero)><<<static_cast<unsigned>(ceil_div(pieces, kWarps)), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t launch_v8_loss_backward(const V8LossBackwardParams& params, cudaStream_t stream) {
  if (const cudaError_t error = launch_v8_dense(params, stream); error != cudaSuccess || params.n == 0) return error;
  return dispatch(params.heads.dtype, [&](auto zero) {
    const auto blocks = static_cast<unsigned>(ceil_div(params.n * params.topk, kTermSlots));
    slot_gradient_kernel<decltype(zero)><<<blocks, kTermThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace torch_fastdet::core
