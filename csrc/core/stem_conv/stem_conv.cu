// The kernels are bound by memory: forward reads sixteen channels and writes the outputs, backward reads both.
#include <type_traits>

#include "core/stem_conv/stem_conv_kernels.cuh"

namespace torch_fastdet::core {
namespace {

// Hold the arguments of StemTile after the outputs, in its order. `blocks` limits the registers.
struct Shape {
  int chunk, rows, warps, stages, blocks;
};

// These were the fastest of some fifteen shapes each on an H200 (images of 640x640, batches of 64 and 16).
constexpr Shape forward_shape(int side, int outputs) {
  switch (outputs) {
    case 16:
      return {16, 8, 4, 2, 5};
    case 32:
      return {32, 16, 4, 2, 2};
    case 48:
      return {16, 16, 2, 2, 3};
    case 64:
      return side == 3 ? Shape{32, 8, 2, 2, 3} : Shape{16, 8, 2, 2, 2};
    case 80:
      return {16, 16, 2, 2, 2};
    default:
      return {16, 8, 2, 2, 1};
  }
}

constexpr Shape backward_shape(int outputs) {
  switch (outputs) {
    case 16:
      return {16, 8, 2, 2, 4};
    case 32:
      return {32, 4, 4, 3, 2};
    case 80:
      return {16, 8, 1, 2, 3};
    case 96:
      return {16, 8, 1, 2, 2};
    default:
      return {16, 8, 2, 2, 2};
  }
}

template <typename T, int kSide, int kOutputs>
struct ForwardTile {
  static constexpr Shape kShape = forward_shape(kSide, kOutputs);
  using Type = StemTile<T, kSide, kOutputs, kShape.chunk, kShape.rows, kShape.warps, 1, kShape.stages, kShape.blocks>;
};

template <typename T, int kSide, int kOutputs>
struct BackwardTile {
  static constexpr Shape kShape = backward_shape(kOutputs);
  using Type = StemTile<T, kSide, kOutputs, kShape.chunk, kShape.rows, kShape.warps, 1, kShape.stages, kShape.blocks>;
};

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Call f(zero of the type, constant of the side, constant of the outputs).
template <typename F>
cudaError_t dispatch_outputs(const StemConvSizes& sizes, DType dtype, F&& f) {
  const auto with_outputs = [&](auto zero, auto side) {
    switch (sizes.outputs) {
      case 16:
        return f(zero, side, Constant<16>{});
      case 32:
        return f(zero, side, Constant<32>{});
      case 48:
        return f(zero, side, Constant<48>{});
      case 64:
        return f(zero, side, Constant<64>{});
      case 80:
        return f(zero, side, Constant<80>{});
      case 96:
        return f(zero, side, Constant<96>{});
    }
    return cudaErrorInvalidValue;
  };
  const auto with_side = [&](auto zero) {
    return sizes.side == 3 ? with_outputs(zero, Constant<3>{}) : with_outputs(zero, Constant<2>{});
  };
  if (!stem_conv_has(sizes.outputs) || !stem_conv_fits(sizes)) return cudaErrorInvalidValue;
  if (dtype == DType::kFloat16) return with_side(__half{});
  return dtype == DType::kBFloat16 ? with_side(__nv_bfloat16{}) : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t stem_conv_blocks(const StemConvSizes& sizes, int64_t& blocks) {
  return dispatch_outputs(sizes, DType::kFloat16, [&](auto zero, auto side, auto outputs) {
    using Tile = typename BackwardTile<decltype(zero), side, outputs>::Type;
    return stem_blocks<Tile>(sizes, stem_backward_bytes<Tile>(), blocks);
  });
}

cudaError_t launch_stem_conv_forward(const StemConvForwardParams& params, cudaStream_t stream) {
  return dispatch_outputs(params.sizes, params.dtype, [&](auto zero, auto side, auto outputs) {
    return stem_launch_forward<typename ForwardTile<decltype(zero), side, outputs>::Type>(params, stream);
  });
}

cudaError_t launch_stem_conv_backward(const StemConvBackwardParams& params, cudaStream_t stream) {
  return dispatch_outputs(params.sizes, params.dtype, [&](auto zero, auto side, auto outputs) {
    return stem_launch_backward<typename BackwardTile<decltype(zero), side, outputs>::Type>(params, stream);
  });
}

}  // namespace torch_fastdet::core
