// The image operators on CUDA: launches on the current stream what run.h has prepared.
#include <torch/library.h>

#include "ops/common/launch.h"
#include "ops/image/run.h"

namespace torch_fastdet {
namespace {

struct Cuda {
  static void run(const core::AugmentParams& params, const char* op) {
    check_launch(core::launch_image_augment(params, c10::cuda::getCurrentCUDAStream()), op);
  }
  static void run(const core::LetterboxParams& params, const char* op) {
    check_launch(core::launch_image_letterbox(params, c10::cuda::getCurrentCUDAStream()), op);
  }
  static void run(const core::ResizeParams& params, const char* op) {
    check_launch(core::launch_image_resize(params, c10::cuda::getCurrentCUDAStream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  m.impl("image_augment", TORCH_FN(image_augment<Cuda>));
  m.impl("image_augment_", TORCH_FN(image_augment_<Cuda>));
  m.impl("image_letterbox", TORCH_FN(image_letterbox<Cuda>));
  m.impl("image_letterbox_", TORCH_FN(image_letterbox_<Cuda>));
  m.impl("image_resize_", TORCH_FN(image_resize_<Cuda>));
}

}  // namespace torch_fastdet
