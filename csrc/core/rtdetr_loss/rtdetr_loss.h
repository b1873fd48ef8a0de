// RT-DETR's loss has prediction sets, whose queries are assigned to targets at the lowest cost, and denoising sets,
// whose queries come with a target. Memory grows with queries and, for the costs, with queries x targets of an image.
#pragma once

#include <cstdint>

#include "core/common/cuda_api.h"
#include "core/common/dtype.h"
#include "core/common/host_device.h"

namespace torch_fastdet::core {

constexpr int kRtdetrStatusSize = 2;
constexpr int kRtdetrChunk = 64;  // queries of a block

// Describe prediction sets of one kind, dense. A is the arithmetic type of the scores' dtype.
struct RtdetrSets {
  int64_t sets, queries;
  const void* boxes;   // (sets, images, queries, 4) A
  const void* scores;  // (sets, images, queries, classes), logits
  void* grad_boxes;    // same shape as boxes
  void* grad_scores;   // same shape as scores

  TORCH_FASTDET_HOST_DEVICE int64_t chunks() const { return ceil_div(queries, kRtdetrChunk); }
};

struct RtdetrLossParams {
  RtdetrSets assigned, noisy;
  int64_t images, classes, most;  // most: maximum number of targets of an image
  DType dtype;                    // of scores
  const float* targets;           // (images, most, 5): class, x, y, width, height
  const int64_t* counts;          // (images): number of valid targets
  const int64_t* matches;         // (images, noisy.queries): target of each denoising query, or -1
  double gains[3], costs[3];      // of class, box and GIoU
  // These are scratch memory.
  void* cost;        // (assigned.sets, images, most, assigned.queries) A
  int64_t* rows;     // (assigned.sets, images, most): query of each target
  void* assignment;  // scratch memory of linear_assignment
  void* partials;    // (blocks, 4) A
  // The backward pass reads these, of all assigned queries and then all noisy ones.
  int32_t* owner;  // target of each query, or -1
  void* quality;   // A: their IoU, or 0
  void* scales;    // (sets of both kinds, 4) A: d(loss) / d(sum) of class, box and GIoU terms, and the entropy's alpha
  // The forward pass writes these results.
  void* loss;       // A
  void* terms;      // (sets of both kinds, 3) A: class, box and GIoU
  int64_t* status;  // number of bad targets and counts, and rtdetr_fault_code of the first
  // Only the backward pass reads this.
  const void* grad_loss;  // A

  TORCH_FASTDET_HOST_DEVICE int64_t sets() const { return assigned.sets + noisy.sets; }
  TORCH_FASTDET_HOST_DEVICE int64_t blocks() const {
    return images * (assigned.sets * assigned.chunks() + noisy.sets * noisy.chunks());
  }
  // Treat an image whose count is out of range as one without targets.
  TORCH_FASTDET_HOST_DEVICE int64_t count(int64_t image) const {
    const int64_t n = counts[image];
    return n >= 0 && n <= most ? n : 0;
  }
  TORCH_FASTDET_HOST_DEVICE int32_t owner_of(int64_t place) const { return owner[place] < most ? owner[place] : -1; }
  // Return -1 if there is no such class; then the query has no positive class.
  TORCH_FASTDET_HOST_DEVICE int32_t class_of(int64_t image, int64_t target) const {
    const float label = targets[(image * most + target) * 5];
    return label >= 0 && label < static_cast<float>(classes) ? static_cast<int32_t>(label) : -1;
  }
  template <typename A>
  TORCH_FASTDET_HOST_DEVICE void target_box(int64_t image, int64_t target, A (&box)[4]) const {
    for (int i = 0; i < 4; ++i) box[i] = static_cast<A>(targets[(image * most + target) * 5 + 1 + i]);
  }
};

// Row `most` of an image stands for its count. Lower positions have greater codes.
TORCH_FASTDET_HOST_DEVICE int64_t rtdetr_fault_code(int64_t image, int64_t row, int64_t most) {
  return (int64_t{1} << 60) - (image * (most + 1) + row);
}

// A part is up to kRtdetrChunk neighbouring queries of a set and image.
struct RtdetrPart {
  const RtdetrSets* sets;
  int64_t set, image;    // set: index among the sets of both kinds
  int64_t problem;       // index of set and image within its kind
  int64_t first, count;  // queries
  int64_t place;         // index of the first query among those of both kinds
  bool noisy;
};

TORCH_FASTDET_HOST_DEVICE RtdetrPart rtdetr_part(const RtdetrLossParams& p, int64_t block) {
  const int64_t assigned_blocks = p.images * p.assigned.sets * p.assigned.chunks();
  RtdetrPart part{};
  part.noisy = block >= assigned_blocks;
  part.sets = part.noisy ? &p.noisy : &p.assigned;
  if (part.noisy) block -= assigned_blocks;
  const int64_t chunks = part.sets->chunks();
  part.problem = block / chunks;
  part.first = block % chunks * kRtdetrChunk;
  const int64_t left = part.sets->queries - part.first;
  part.count = left < kRtdetrChunk ? left : kRtdetrChunk;
  part.set = part.problem / p.images + (part.noisy ? p.assigned.sets : 0);
  part.image = part.problem % p.images;
  part.place = (part.noisy ? p.images * p.assigned.sets * p.assigned.queries : 0) + part.problem * part.sets->queries +
               part.first;
  return part;
}

cudaError_t launch_rtdetr_loss(const RtdetrLossParams& params, cudaStream_t stream);
cudaError_t launch_rtdetr_loss_backward(const RtdetrLossParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
