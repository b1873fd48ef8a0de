// Decode JPEG files on CUDA, on the current stream.
#include <ATen/ops/empty.h>

#include "core/jpeg/jpeg_plan.h"
#include "ops/common/launch.h"
#include "ops/jpeg/run.h"

namespace torch_fastdet::jpeg_cuda {
namespace {

struct Cuda : OnDevice {
  static void run(core::JpegParams& p, const char* op) {
    const int64_t bytes = core::JpegWorkspace(p.images, p.groups, p.tiles).end + p.decoded_bytes;
    const at::Tensor workspace = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCUDA));
    p.workspace = workspace.mutable_data_ptr<uint8_t>();
    check_launch(core::launch_jpeg_decode(p, current_stream()), op);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_jpeg<Cuda>(m);
}

}  // namespace torch_fastdet::jpeg_cuda
