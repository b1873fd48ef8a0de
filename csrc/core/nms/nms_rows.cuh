// Write detections: a row when its box is decided, then the rest of the output.
#pragma once

#include "core/nms/nms_device.cuh"

namespace torch_fastdet::core {

template <typename A>
__device__ __forceinline__ A* detection_row(const NmsKernel& p, int64_t image, int64_t row) {
  return static_cast<A*>(p.output.detections) + (image * p.options.max_detections + row) * (6 + p.source.extra);
}

template <typename A>
__device__ __forceinline__ void write_numbers(const NmsKernel& p, int64_t image, int64_t row, int64_t anchor, A first,
                                              A second, A third, A fourth, A confidence, int32_t box_class) {
  p.output.indices[image * p.options.max_detections + row] = anchor;
  A* out = detection_row<A>(p, image, row);
  out[0] = first;
  out[1] = second;
  out[2] = third;
  out[3] = fourth;
  out[4] = confidence;
  out[5] = A(box_class);
}

template <typename A>
__device__ __forceinline__ void write_row(const NmsKernel& p, int64_t image, int64_t row, int64_t anchor,
                                          CornerBox<A> box, A confidence, int32_t box_class) {
  if (p.output.letterboxes) box = scale_corners(box, letterbox_of(letterbox_row<A>(p.output, image)));
  write_numbers(p, image, row, anchor, box.x1, box.y1, box.x2, box.y2, confidence, box_class);
}

template <typename A>
__device__ __forceinline__ void write_row(const NmsKernel& p, int64_t image, int64_t row, int64_t anchor,
                                          CenterBox<A> box, A confidence, int32_t box_class) {
  if (p.output.letterboxes) box = scale_center(box, letterbox_of(letterbox_row<A>(p.output, image)));
  write_numbers(p, image, row, anchor, box.x, box.y, box.width, box.height, confidence, box_class);
}

// Write the count, the extra columns of the kept rows, and zeros (and index -1) past them, with one block.
template <typename A>
__device__ __forceinline__ void write_rest(const NmsKernel& p, int64_t image, int64_t kept, bool promoted) {
  const int64_t rows = p.options.max_detections, extra = p.source.extra;
  int64_t* indices = p.output.indices + image * rows;
  if (threadIdx.x == 0) p.output.counts[image] = kept;
  if (extra && kept) {
    const A* letterbox = letterbox_row<A>(p.output, image);
    with_layout<A>(p.source, [&](auto layout) {
      for (int64_t i = threadIdx.x; i < kept * extra; i += blockDim.x) {
        const int64_t row = i / extra, e = i - row * extra;
        detection_row<A>(p, image, row)[6 + e] =
            detection_extra<decltype(layout)>(p.source, p.options, image, indices[row], e, promoted, letterbox);
      }
    });
  }
  A* tail = detection_row<A>(p, image, kept);
  for (int64_t i = threadIdx.x; i < (rows - kept) * (6 + extra); i += blockDim.x) tail[i] = A(0);
  for (int64_t row = kept + threadIdx.x; row < rows; row += blockDim.x) indices[row] = -1;
}

}  // namespace torch_fastdet::core
