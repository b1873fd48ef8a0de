// Raw YOLOv5 head maps to the decoded prediction tensor of the original Detect module.
#pragma once

#include "core/common/cuda_api.h"
#include "core/nms/nms.h"

namespace torch_fastdet::core {

// output (images, anchors, 5 + classes + extra), contiguous, of the source's dtype: center and size in pixels, sigmoid
// of objectness and classes, extra channels as they are. Computed in the arithmetic type and rounded once.
struct DecodeParams {
  CandidateSource source;  // layout kAnchorHeads
  void* output = nullptr;
};

cudaError_t launch_yolov5_decode(const DecodeParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
