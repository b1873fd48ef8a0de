// The image operators on CUDA: launches on the current stream what run.h has prepared.
#include "ops/common/launch.h"
#include "ops/image/run.h"

namespace torch_fastdet::image_cuda {
namespace {

struct Cuda : OnDevice {
  static void run(const core::AugmentParams& params, const char* op) {
    check_launch(core::launch_image_augment(params, current_stream()), op);
  }
  static void run(const core::LetterboxParams& params, const char* op) {
    check_launch(core::launch_image_letterbox(params, current_stream()), op);
  }
  static void run(const core::ResizeParams& params, const char* op) {
    check_launch(core::launch_image_resize(params, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_image<Cuda>(m);
}

}  // namespace torch_fastdet::image_cuda
