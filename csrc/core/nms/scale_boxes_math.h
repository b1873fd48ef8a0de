// Scale one box of ScaleBoxesParams.
#pragma once

#include "core/common/storage.h"
#include "core/common/yolo_math.h"
#include "core/nms/scale_boxes.h"

namespace torch_fastdet::core {

template <typename T>
TORCH_FASTDET_HOST_DEVICE void scale_one_box(const ScaleBoxesParams& p, int64_t index) {
  using A = typename Storage<T>::arithmetic;
  const int64_t image = index / p.count;
  const T* in = static_cast<const T*>(p.boxes) + image * p.image_stride + (index - image * p.count) * p.box_stride;
  const A* l = static_cast<const A*>(p.letterboxes) + image * 6;
  const Letterbox<A> letterbox{l[0], l[1], l[2], l[3], l[4], l[5]};
  T* out = static_cast<T*>(p.output) + index * p.columns;
  const A a = Storage<T>::load(in[0]), b = Storage<T>::load(in[p.column_stride]);
  const A c = Storage<T>::load(in[2 * p.column_stride]), d = Storage<T>::load(in[3 * p.column_stride]);
  CornerBox<A> box;
  if (p.center_size) {
    const CenterBox<A> scaled = scale_center(CenterBox<A>{a, b, c, d}, letterbox);
    box = {scaled.x, scaled.y, scaled.width, scaled.height};
  } else {
    box = scale_corners(CornerBox<A>{a, b, c, d}, letterbox);
  }
  out[0] = Storage<T>::store(box.x1);
  out[1] = Storage<T>::store(box.y1);
  out[2] = Storage<T>::store(box.x2);
  out[3] = Storage<T>::store(box.y2);
  for (int64_t i = 4; i < p.columns; ++i) out[i] = in[i * p.column_stride];
}

}  // namespace torch_fastdet::core
