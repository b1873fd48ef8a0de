// Process JPEG files on the CPU, with threads over files.
#include <ATen/ops/empty.h>

#include <string>
#include <tuple>
#include <vector>

#include "core/jpeg/jpeg_loops.h"
#include "core/jpeg/jpeg_pack.h"
#include "core/jpeg/jpeg_plan.h"
#include "ops/common/helpers.h"
#include "ops/common/parallel.h"
#include "ops/jpeg/run.h"

namespace torch_fastdet::jpeg_cpu {
namespace {

void check_aligned(const at::Tensor& tensor, const char* op, const char* name) {
  TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % core::kJpegAlignment == 0, op, ": ", name,
              " does not begin at a multiple of ", core::kJpegAlignment, " bytes");
}

struct Cpu : OnDevice {
  static void run(const core::JpegParams& p, const char* op) {
    for (int64_t i = 0; i < p.images; ++i) {
      const char* fault = core::jpeg_row_fault(p, i);
      TORCH_CHECK(!fault, op, ": row ", i, " of the plan: ", fault);
    }
    core::decode_jpegs(p, parallel_for);
  }
};

enum : int { kOffset, kBytes, kHeight, kWidth, kHead, kPackColumns };

std::tuple<at::Tensor, at::Tensor, std::vector<std::string>> jpeg_pack(at::TensorList files, bool pin_memory,
                                                                       int64_t segment) {
  constexpr const char* kOp = "jpeg_pack";
  const auto count = static_cast<int64_t>(files.size());
  for (int64_t i = 0; i < count; ++i) {
    const std::string name = "files[" + std::to_string(i) + "]";
    check_on_cpu(files[i], kOp, name);
    check_jpeg_bytes(files[i], kOp, name);
  }
  TORCH_CHECK_VALUE(segment == 1 || segment == 2 || segment == 4, kOp, ": segment is ", segment,
                    ", but 1, 2 or 4 is expected");
  const int segment_bits = segment == 4 ? 2 : static_cast<int>(segment) - 1;
  std::vector<std::vector<uint8_t>> packed(files.size());
  std::vector<std::string> refusals(files.size());
  const auto pack = [&](core::JpegPacker& packer, int64_t i) {
    const char* reason = packer.pack(files[i].const_data_ptr<uint8_t>(), files[i].numel(), packed[i]);
    if (reason) refusals[i] = reason;
  };
  if (count == 1) {
    core::JpegPacker packer(segment_bits, Helpers::count(), Helpers::ask);
    pack(packer, 0);
  } else {
    parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      core::JpegPacker packer(segment_bits);
      for (int64_t i = begin; i < end; ++i) pack(packer, i);
    });
  }
  const at::Tensor images = at::empty({count, kPackColumns}, at::TensorOptions().dtype(at::kLong));
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t* row = images.mutable_data_ptr<int64_t>() + i * kPackColumns;
    if (!refusals[i].empty()) {
      row[kOffset] = -1, row[kBytes] = row[kHeight] = row[kWidth] = row[kHead] = 0;
      continue;
    }
    const auto& header = *reinterpret_cast<const core::JpegHeader*>(packed[i].data());
    row[kOffset] = bytes, row[kBytes] = header.bytes;
    row[kHeight] = core::jpeg_shown_height(header), row[kWidth] = core::jpeg_shown_width(header);
    row[kHead] = header.scan;
    bytes += header.bytes;
  }
  const at::Tensor storage = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(pin_memory));
  parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t* row = images.const_data_ptr<int64_t>() + i * kPackColumns;
      if (row[kOffset] >= 0) {
        std::memcpy(storage.mutable_data_ptr<uint8_t>() + row[kOffset], packed[i].data(), packed[i].size());
      }
    }
  });
  return {storage, images, refusals};
}

std::tuple<at::Tensor, std::vector<int64_t>> jpeg_plan(const at::Tensor& headers, const at::Tensor& asked) {
  constexpr const char* kOp = "jpeg_plan";
  check_on_cpu(headers, kOp, "headers");
  check_on_cpu(asked, kOp, "asked");
  check_jpeg_bytes(headers, kOp, "headers");
  check_jpeg_table(asked, core::kJpegAskedColumns + 1, kOp, "asked");
  check_aligned(headers, kOp, "headers");
  const int64_t images = asked.size(0);
  const int64_t* rows = asked.const_data_ptr<int64_t>();
  const at::Tensor plan = at::empty({images, core::kJpegColumns}, asked.options());
  int64_t* out = plan.mutable_data_ptr<int64_t>();
  const auto header = [&](int64_t i) -> const core::JpegHeader& {
    const int64_t offset = rows[i * (core::kJpegAskedColumns + 1)];
    return *reinterpret_cast<const core::JpegHeader*>(headers.const_data_ptr<uint8_t>() + offset);
  };
  for (int64_t i = 0; i < images; ++i) {
    const int64_t* row = rows + i * (core::kJpegAskedColumns + 1);
    int64_t* to = out + i * core::kJpegColumns;
    std::copy(row + 1, row + 1 + core::kJpegAskedColumns, to);
    const int64_t width = to[core::kJpegWidth], height = to[core::kJpegHeight];
    if (width == 0 || height == 0) continue;
    TORCH_CHECK_VALUE(row[0] >= 0 && row[0] % core::kJpegAlignment == 0 &&
                          row[0] <= headers.numel() - core::kJpegHeaderBytes &&
                          core::jpeg_is_sound(header(i), INT64_MAX),
                      kOp, ": row ", i, " of asked: there is no header of a packed JPEG at ", row[0]);
    const int64_t x = to[core::kJpegX], y = to[core::kJpegY];
    TORCH_CHECK_VALUE(x >= 0 && y >= 0 && width > 0 && height > 0 && width <= core::jpeg_shown_width(header(i)) - x &&
                          height <= core::jpeg_shown_height(header(i)) - y,
                      kOp, ": row ", i, " of asked: its rectangle (", x, ", ", y, ", ", width, ", ", height,
                      ") is not in an image of ", core::jpeg_shown_width(header(i)), " x ",
                      core::jpeg_shown_height(header(i)), " pixels");
  }
  const core::JpegTotals totals = core::complete_jpeg_plan(out, images, header);
  return {plan, {totals.decoded_bytes, totals.groups, totals.tiles}};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_jpeg<Cpu>(m);
}

// Register for every device, so that a tensor of another device fails our checks, not with PyTorch's list of backends.
TORCH_LIBRARY_IMPL(torch_fastdet, CompositeExplicitAutograd, m) {
  m.impl("jpeg_pack", TORCH_FN(jpeg_pack));
  m.impl("jpeg_plan", TORCH_FN(jpeg_plan));
}

}  // namespace torch_fastdet::jpeg_cpu
