// Masks on the CPU: threads over bands of rows.
#include <algorithm>

#include "core/masks/masks_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/masks/run.h"

namespace torch_fastdet::masks_cpu {
namespace {

struct Cpu : OnDevice {
  // The loops read float32 rows.
  static at::Tensor prototypes(const at::Tensor& protos) { return dense_float_rows(protos); }

  static void run(const core::MasksParams& p, const char*) {
    const core::MaskTables tables(p);
    parallel_for(0, core::mask_bands(p), 1,
                 [&](int64_t begin, int64_t end) { core::mask_bands_between(p, tables, begin, end); });
  }

  static void run(const core::CropParams& p, const char*) {
    const auto crop = [&](auto zero) {
      parallel_for(0, p.count * p.height, std::max(1, 32768 / p.width),
                   [&](int64_t begin, int64_t end) { core::crop_rows<decltype(zero)>(p, begin, end); });
    };
    p.integer_bytes ? core::with_integer(p.integer_bytes, crop) : with_dtype(p.dtype, crop);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_masks<Cpu>(m);
}

}  // namespace torch_fastdet::masks_cpu
