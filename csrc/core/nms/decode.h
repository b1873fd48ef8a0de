// Decode raw YOLOv5 head maps to the prediction tensor of the original Detect module.
#pragma once

#include "core/common/cuda_api.h"
#include "core/nms/nms.h"

namespace torch_fastdet::core {

// `output` is contiguous, (images, anchors, 5 + classes + extra) of the source's dtype. It has center and size in
// pixels, sigmoids of objectness and classes, and the extra channels. Arithmetic is in the arithmetic type and rounds
// once.
struct DecodeParams {
  CandidateSource source;  // layout kAnchorHeads
  void* output = nullptr;
};

cudaError_t launch_yolov5_decode(const DecodeParams& params, cudaStream_t stream);

}  // namespace torch_fastdet::core
