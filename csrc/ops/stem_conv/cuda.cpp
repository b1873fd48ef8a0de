// Run stem_conv2d on CUDA, on the current stream.
#include <ATen/cuda/CUDAContext.h>

#include "ops/common/launch.h"
#include "ops/stem_conv/run.h"

namespace torch_fastdet::stem_conv_cuda {
namespace {

void check_kernels(const core::StemConvSizes& sizes, core::DType dtype, const char* op) {
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  TORCH_CHECK(properties->major >= 8, op, ": the GPU has compute capability ", properties->major, ".",
              properties->minor, ", but 8.0 or newer is expected");
  TORCH_CHECK(dtype == core::DType::kFloat16 || dtype == core::DType::kBFloat16, op, ": squares has dtype ",
              dtype == core::DType::kFloat32 ? "float32" : "float64", ", but float16 or bfloat16 is expected on a GPU");
  TORCH_CHECK(core::stem_conv_fits(sizes), op, ": ", sizes.batch, " images of ", sizes.height, " x ", sizes.width,
              " pixels with ", sizes.outputs, " channels came, but at most 2147483647 pixels, and elements of an ",
              "image, are expected");
}

struct Cuda : OnDevice {
  static void forward(const core::StemConvForwardParams& p, const char* op) {
    check_kernels(p.sizes, p.dtype, op);
    check_launch(core::launch_stem_conv_forward(p, current_stream()), op);
  }
  static void backward(core::StemConvBackwardParams& p, const at::TensorOptions& options, const char* op) {
    check_kernels(p.sizes, p.dtype, op);
    check_launch(core::stem_conv_blocks(p.sizes, p.blocks), op);
    const at::Tensor parts = at::empty({p.blocks * p.sizes.weights()},
                                       options.dtype(at::kFloat).memory_format(at::MemoryFormat::Contiguous));
    p.parts = parts.mutable_data_ptr<float>();
    check_launch(core::launch_stem_conv_backward(p, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_stem_conv<Cuda>(m);
}

}  // namespace torch_fastdet::stem_conv_cuda
