// Run the image operators on the CPU: the core's loops on Torch's threads.
#include <c10/util/Half.h>

#include "core/image/image_loops.h"
#include "ops/common/parallel.h"
#include "ops/image/check_tables.h"
#include "ops/image/run.h"

namespace torch_fastdet::image_cpu {
namespace {

struct Cpu : OnDevice {
  template <int kChannels>
  static void fill(const core::AugmentParams& p) {
    core::augment_batch<c10::Half, kChannels>(p, at::get_num_threads(), parallel_for);
  }
  template <int kChannels>
  static void fill(const core::LetterboxParams& p) {
    core::letterbox_batch<c10::Half, kChannels>(p, at::get_num_threads(), parallel_for);
  }
  template <typename Params>
  static void run(const Params& p, const char* op) {
    check_rows(p, op);
    if (p.out.height == 0 || p.out.width == 0) return;
    p.out.channels == 1 ? fill<1>(p) : fill<3>(p);
  }
  static void run(const core::ResizeParams& p, const char* op) {
    check_rows(p, op);
    p.channels == 1 ? core::resize_images<1>(p, parallel_for) : core::resize_images<3>(p, parallel_for);
  }
};

// A thread copies at least this many bytes (3 ms). After less, PyTorch's threads spin for a while and occupy cores.
constexpr int64_t kGatherGrain = int64_t{32} << 20;

void image_gather_(at::Tensor& out, at::TensorList storages, const at::Tensor& pieces) {
  constexpr const char* kOp = "image_gather_";
  check_storages(storages, kOp);
  check_on_cpu(storages[0], kOp, "storages[0]");
  check_dense_1d(out, storages[0], kOp, "out");
  check_table(pieces, core::kPieceColumns, at::kLong, storages[0], kOp, "pieces");
  const core::Storages from = core_storages(storages);
  const auto* rows = pieces.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < pieces.size(0); ++i) check_piece(from, rows + i * core::kPieceColumns, out.numel(), kOp, i);
  core::gather_pieces(from, rows, pieces.size(0), out.mutable_data_ptr<uint8_t>(), kGatherGrain, parallel_for);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_image<Cpu>(m);
}

// Register for every device, so that a tensor of another device fails our checks, not with PyTorch's list of backends.
TORCH_LIBRARY_IMPL(torch_fastdet, CompositeExplicitAutograd, m) {
  m.impl("image_gather_", TORCH_FN(image_gather_));
}

}  // namespace torch_fastdet::image_cpu
