// Masks on CUDA: one launch on the current stream.
#include "core/masks/masks.h"
#include "ops/common/launch.h"
#include "ops/masks/run.h"

namespace torch_fastdet::masks_cuda {
namespace {

struct Cuda : OnDevice {
  // The kernel reads any strides.
  static at::Tensor prototypes(const at::Tensor& protos) {
    return protos.scalar_type() == at::kDouble ? protos.to(at::kFloat) : protos;
  }

  static void run(const core::MasksParams& params, const char* op) {
    check_launch(core::launch_masks(params, current_stream()), op);
  }
  static void run(const core::CropParams& params, const char* op) {
    check_launch(core::launch_crop(params, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_masks<Cuda>(m);
}

}  // namespace torch_fastdet::masks_cuda
