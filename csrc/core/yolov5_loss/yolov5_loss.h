// The YOLOv5 training loss tries every target in each level, anchor and neighbouring cell. Each such candidate has a
// slot of its own, so that nothing is compacted, counted on the host or ordered nondeterministically. Slots are in the
// order in which YOLOv5 lists its matches: offset, anchor, target.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/yolov5_loss/yolov5_loss_math.h"

namespace torch_fastdet::core {

constexpr int kYolov5MaxLevels = 8;
constexpr int kYolov5StatusSize = 4;

// These are the layouts of a head's gradient; `cell` numbers cells in this order.
enum class Yolov5Layout : int32_t {
  kAnchorRows,  // (bs, na, ny, nx, no) contiguous
  kCellRows,    // (bs, ny, nx, na, no) contiguous: a channels_last (bs, na*no, ny, nx) head
  kPlanes,      // (bs, na, no, ny, nx) contiguous: a contiguous (bs, na*no, ny, nx) head
};

struct Yolov5Head {
  const void* logits;  // (bs, na, ny, nx, no) by the strides below, in elements
  void* gradient;      // dense, as `layout` says; null in the forward pass
  int64_t stride_b, stride_a, stride_y, stride_x, stride_o;
  int64_t ny, nx;
  int64_t first_cell;  // index of this level's first cell in `owner`
  int64_t cells;       // bs * na * ny * nx
  Yolov5Layout layout;
  bool dense;  // the logits have the strides of `layout`
};

// The forward pass leaves these for the backward pass. Scalars have the arithmetic type of the heads' dtype.
struct Yolov5LossState {
  // This holds all levels' cells, followed by the status. A cell is 0 for background, else the key of the match that
  // sets its objectness (the greatest key wins), with kShared set if several matches share the cell.
  uint64_t* owner;
  int64_t* match_cell;    // (nl, 5, na, nt) cell, or -1 for a candidate that does not match
  void* match_values;     // (nl, 5, na, nt, 5) the cell's objectness target, d(1 - CIoU) / d(x, y, w, h logits)
  void* object_gradient;  // (cells of all levels) d(objectness entropy) / d(logit)
  void* levels;           // (nl, 4) mean objectness entropy; d(loss) / d(sum of box, of objectness, of class terms)
};

struct Yolov5LossParams {
  DType dtype;  // of the heads
  Yolov5Head heads[kYolov5MaxLevels];
  int nl, na, nc, no;
  int64_t bs;
  const float* targets;  // (nt, 6) contiguous: image, class, x, y, w, h
  int64_t nt;
  const int64_t* num_targets;  // device scalar: number of valid rows, the rest is padding; null: all
  const float* anchors;        // (nl, na, 2), grid units
  const double* balance;       // (nl)
  double box, obj, cls;        // gains
  double cls_pw, obj_pw;       // weights of the positive terms
  double positive, negative;   // class targets after label smoothing
  double fl_gamma, gr;
  float anchor_t;
  bool sort_obj_iou;
  Yolov5LossState state;
  // Each block writes one row of partial sums; they are added in a fixed order, whichever block ends first.
  void* match_partials;   // (nl, match blocks, 3): 1 - CIoU, class entropy, number of matches
  void* object_partials;  // (nl, object blocks): objectness entropy
  void* loss;             // (1)
  void* items;            // (3) box, objectness, class
  // Rows ignored; greatest kYolov5FirstFault - (6 * row + column); num_targets less rows outside of it, else 0; unused.
  int64_t* status;
};

struct Yolov5LossBackwardParams {
  DType dtype;
  Yolov5Head heads[kYolov5MaxLevels];
  int nl, na, nc, no;
  int64_t bs;
  const float* targets;
  int64_t nt;
  double cls_pw, positive, negative, fl_gamma;
  Yolov5LossState state;
  const void* grad_loss;  // device scalar
};

constexpr uint64_t kYolov5Shared = uint64_t{1} << 63;
constexpr int64_t kYolov5FirstFault = int64_t{1} << 62;

// A key sorts by CIoU if matches are sorted, then by slot; it is never 0 and leaves kShared free.
TORCH_FASTDET_HOST_DEVICE uint64_t yolov5_key(bool sort_obj_iou, float iou, int64_t slot) {
  const uint32_t bits = sort_obj_iou && iou > 0.0f ? float_bits(iou) : 0;
  return (static_cast<uint64_t>(bits) << 32) | static_cast<uint64_t>(slot + 1);
}

TORCH_FASTDET_HOST_DEVICE int64_t yolov5_key_slot(uint64_t key) {
  return static_cast<int64_t>(key & 0xffffffffu) - 1;
}

struct Yolov5Cell {
  int64_t b, a, y, x;
};

TORCH_FASTDET_HOST_DEVICE Yolov5Cell yolov5_cell(const Yolov5Head& head, int na, int64_t cell) {
  Yolov5Cell at{};
  if (head.layout == Yolov5Layout::kCellRows) {
    at.a = cell % na;
    cell /= na;
    at.x = cell % head.nx;
    cell /= head.nx;
    at.y = cell % head.ny;
    at.b = cell / head.ny;
  } else {
    at.x = cell % head.nx;
    cell /= head.nx;
    at.y = cell % head.ny;
    cell /= head.ny;
    at.a = cell % na;
    at.b = cell / na;
  }
  return at;
}

TORCH_FASTDET_HOST_DEVICE int64_t yolov5_cell_number(const Yolov5Head& head, int na, const Yolov5Cell& at) {
  return head.layout == Yolov5Layout::kCellRows ? ((at.b * head.ny + at.y) * head.nx + at.x) * na + at.a
                                                : ((at.b * na + at.a) * head.ny + at.y) * head.nx + at.x;
}

// Return the offset of a cell's first logit; the others follow at stride_o.
TORCH_FASTDET_HOST_DEVICE int64_t yolov5_logits_offset(const Yolov5Head& head, int na, int no, int64_t cell) {
  if (head.dense && head.layout != Yolov5Layout::kPlanes) return cell * no;
  const Yolov5Cell at = yolov5_cell(head, na, cell);
  return at.b * head.stride_b + at.a * head.stride_a + at.y * head.stride_y + at.x * head.stride_x;
}

// Return the offset of a cell's first element in the gradient.
TORCH_FASTDET_HOST_DEVICE int64_t yolov5_gradient_offset(const Yolov5Head& head, int no, int64_t cell) {
  if (head.layout != Yolov5Layout::kPlanes) return cell * no;
  const int64_t plane = head.ny * head.nx;
  return cell / plane * plane * no + cell % plane;
}

TORCH_FASTDET_HOST_DEVICE int64_t yolov5_gradient_step(const Yolov5Head& head) {
  return head.layout == Yolov5Layout::kPlanes ? head.ny * head.nx : 1;
}

// Return the number of rows of match_partials and of object_partials for each level.
int64_t yolov5_match_blocks(const Yolov5LossParams& params);
int64_t yolov5_object_blocks(const Yolov5LossParams& params);
// The launchers clear owner and status themselves.
cudaError_t launch_yolov5_loss(const Yolov5LossParams& params, cudaStream_t stream);
cudaError_t launch_yolov5_loss_backward(const Yolov5LossBackwardParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
