// Deformable attention on CUDA: one launch forward and two backward, on the current stream.
#include "ops/common/launch.h"
#include "ops/deformable_attention/run.h"

namespace torch_fastdet::deformable_attention_cuda {
namespace {

struct Cuda : OnDevice {
  static constexpr bool kBounds = true;

  static void run(const core::DeformableAttentionParams& params, const char* op) {
    check_launch(core::launch_deformable_attention(params, current_stream()), op);
  }
  static void run(const core::DeformableAttentionBackwardParams& params, const char* op) {
    check_launch(core::launch_deformable_attention_backward(params, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_deformable_attention<Cuda>(m);
}

}  // namespace torch_fastdet::deformable_attention_cuda
