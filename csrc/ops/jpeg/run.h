// Run jpeg_decode_ except the loops, which are Backend::run(params, op) of cpu.cpp and cuda.cpp. jpeg_pack and
// jpeg_plan read bytes on the host, in cpu.cpp.
#pragma once

#include "ops/common/backend.h"
#include "ops/jpeg/checks.h"

namespace torch_fastdet {

template <class Backend>
void jpeg_decode_(at::Tensor& out, const at::Tensor& storage, const at::Tensor& plan, at::IntArrayRef sizes) {
  check_jpeg_decode(out, storage, plan, sizes);
  if constexpr (!Backend::kMeta) {
    const c10::DeviceGuard guard(out.device());
    core::JpegParams p{};
    p.storage = storage.const_data_ptr<uint8_t>();
    p.storage_bytes = storage.numel();
    p.plan = plan.const_data_ptr<int64_t>();
    p.images = plan.size(0);
    p.out = out.mutable_data_ptr<uint8_t>();
    p.out_bytes = out.numel();
    p.decoded_bytes = sizes[0], p.groups = sizes[1], p.tiles = sizes[2];
    if (!p.images) return;
    TORCH_CHECK(reinterpret_cast<uintptr_t>(p.storage) % core::kJpegAlignment == 0,
                "jpeg_decode_: storage does not begin at a multiple of ", core::kJpegAlignment, " bytes");
    Backend::run(p, "jpeg_decode_");
  }
}

template <class Backend>
void register_jpeg(torch::Library& m) {
  m.impl("jpeg_decode_", TORCH_FN(jpeg_decode_<Backend>));
}

}  // namespace torch_fastdet
