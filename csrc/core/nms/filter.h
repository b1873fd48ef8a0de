// Select rows of a model without suppression: those above a threshold, in their order.
#pragma once

#include "core/common/cuda_api.h"
#include "core/common/exact_math.h"
#include "core/common/storage.h"
#include "core/nms/nms.h"

namespace torch_fastdet::core {

// Strides are in elements. A row has the box, confidence, class and further columns, which are copied.
struct FilterParams {
  const void* rows = nullptr;   // (images, count, columns)
  const void* sizes = nullptr;  // (images, 2) of the detections' type: width and height. Boxes are then center and size
                                // relative to it, and are output as corners. Null: boxes stay as they are.
  int64_t images = 0, count = 0, columns = 0;
  int64_t image_stride = 0, row_stride = 0, column_stride = 0;
  double confidence = 0;  // rounded to `dtype`
  bool finite = false;    // drop rows whose box is not finite
  ClassFilter filter;
  NmsOutput output;
  int64_t capacity = 0;  // output rows per image
  DType dtype = DType::kFloat32;
};

template <typename T>
TORCH_FASTDET_HOST_DEVICE const T* filter_row(const FilterParams& p, int64_t image, int64_t row) {
  return static_cast<const T*>(p.rows) + image * p.image_stride + row * p.row_stride;
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE bool passes_filter(const FilterParams& p, int64_t image, int64_t row) {
  using A = typename Storage<T>::arithmetic;
  const T* in = filter_row<T>(p, image, row);
  if (!(Storage<T>::load(in[4 * p.column_stride]) > static_cast<A>(p.confidence))) return false;
  for (int column = 0; p.finite && column < 5; ++column) {
    if (!is_finite(Storage<T>::load(in[column * p.column_stride]))) return false;
  }
  if (!p.filter.active) return true;
  const A name = Storage<T>::load(in[5 * p.column_stride]);
  if (!(name >= 0 && name < static_cast<A>(kMaxFilteredClasses))) return false;
  const auto number = static_cast<int32_t>(name);
  return static_cast<A>(number) == name && p.filter.has(number);
}

// Write row `row` of the input to row `place` of the output.
template <typename T>
TORCH_FASTDET_HOST_DEVICE void write_filtered(const FilterParams& p, int64_t image, int64_t row, int64_t place) {
  using A = typename Storage<T>::arithmetic;
  const T* in = filter_row<T>(p, image, row);
  A* out = static_cast<A*>(p.output.detections) + (image * p.capacity + place) * p.columns;
  p.output.indices[image * p.capacity + place] = row;
  for (int64_t i = 0; i < p.columns; ++i) out[i] = Storage<T>::load(in[i * p.column_stride]);
  if (p.sizes == nullptr) return;
  const A* size = static_cast<const A*>(p.sizes) + image * 2;
  const A x = out[0], y = out[1], half_width = out[2] / 2, half_height = out[3] / 2;
  out[0] = (x - half_width) * size[0];
  out[1] = (y - half_height) * size[1];
  out[2] = (x + half_width) * size[0];
  out[3] = (y + half_height) * size[1];
}

template <typename T>
TORCH_FASTDET_HOST_DEVICE void clear_filtered(const FilterParams& p, int64_t image, int64_t place) {
  using A = typename Storage<T>::arithmetic;
  A* out = static_cast<A*>(p.output.detections) + (image * p.capacity + place) * p.columns;
  for (int64_t i = 0; i < p.columns; ++i) out[i] = 0;
  p.output.indices[image * p.capacity + place] = -1;
}

template <typename T>
void filter_image(const FilterParams& p, int64_t image) {
  int64_t found = 0;
  for (int64_t row = 0; row < p.count && found < p.capacity; ++row) {
    if (passes_filter<T>(p, image, row)) write_filtered<T>(p, image, row, found++);
  }
  p.output.counts[image] = found;
  for (int64_t place = found; place < p.capacity; ++place) clear_filtered<T>(p, image, place);
}

cudaError_t launch_filter(const FilterParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
