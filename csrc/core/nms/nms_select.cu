// Mark the images with labels, then run the selection kernels of the layout.
#include "core/nms/nms_select.cuh"

namespace torch_fastdet::core {

namespace {

__global__ void mark_promoted_kernel(const __grid_constant__ NmsKernel p) {
  for (int64_t image = threadIdx.x; image < p.source.images; image += blockDim.x) {
    bool promoted = false;
    for (int64_t i = 0; i < p.source.label_count; ++i) promoted |= p.source.labels[i * 6] == static_cast<float>(image);
    p.at<uint8_t>(p.promoted)[image] = promoted;
  }
}

// Return whether a warp that reads one channel of 32 neighbouring anchors reads adjacent elements.
bool anchors_adjacent(const CandidateSource& source) {
  switch (source.layout) {
    case CandidateLayout::kPrediction:
      return source.anchor_stride < source.channel_stride;
    case CandidateLayout::kAnchorHeads:
      return source.level[0].boxes.column < source.level[0].boxes.channel;
    case CandidateLayout::kAnchorFreeHeads:
      return source.level[0].scores.column < source.level[0].scores.channel;
  }
  return false;
}

}  // namespace

cudaError_t launch_select(const NmsKernel& kernel, const NmsPlan& plan, const ClassFilter& filter,
                          cudaStream_t stream) {
  if (kernel.source.label_count) mark_promoted_kernel<<<1, 256, 0, stream>>>(kernel);
  SelectKernel p{};
  p.nms = kernel;
  p.filter = filter;
  p.anchors_adjacent = anchors_adjacent(kernel.source);
  switch (kernel.source.layout) {
    case CandidateLayout::kPrediction:
      return launch_select_prediction(p, plan, stream);
    case CandidateLayout::kAnchorHeads:
      return launch_select_anchor_heads(p, plan, stream);
    case CandidateLayout::kAnchorFreeHeads:
      return launch_select_anchor_free_heads(p, plan, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torch_fastdet::core
