// Register families that only launch kernels on the current stream. The others have a cuda.cpp of their own.
#include <climits>

#include "ops/boxes/run.h"
#include "ops/common/launch.h"
#include "ops/deformable_attention/run.h"
#include "ops/image/run.h"
#include "ops/linear_assignment/run.h"
#include "ops/masks/run.h"
#include "ops/metrics/run.h"
#include "ops/pool/run.h"
#include "ops/rtdetr_loss/run.h"
#include "ops/slices/run.h"
#include "ops/softmax/run.h"
#include "ops/space_to_depth/run.h"
#include "ops/upsample/run.h"
#include "ops/v8_loss/run.h"
#include "ops/yolov5_loss/run.h"

namespace torch_fastdet::plain_cuda {
namespace {

template <auto kLaunch>
struct Launch;
template <typename Params, cudaError_t (*kLaunch)(const Params&, cudaStream_t)>
struct Launch<kLaunch> {
  static void run(const Params& p, const char* op) { check_launch(kLaunch(p, current_stream()), op); }
};

// This backend's run(params, op) picks the launcher by the type of the parameters.
template <auto... kLaunch>
struct Launches : OnDevice, Launch<kLaunch>... {
  using Launch<kLaunch>::run...;
};

void check_counts(int64_t rows, int64_t elements, const char* op) {
  TORCH_CHECK(rows <= INT_MAX && elements <= INT_MAX, op, ": ", rows, " rows of ", elements,
              " elements came, but at most 2147483647 of each are expected");
}

void check_counts(const core::MaxPoolParams& p, const char* op) {
  check_counts(p.batch * (p.channels_last ? p.height : p.channels), p.width * (p.channels_last ? p.channels : p.height),
               op);
}

struct Boxes : Launches<core::launch_bbox_iou, core::launch_iou_loss, core::launch_iou_backward> {
  static int64_t loss_partials(int64_t pairs) {
    bool clusters = false;
    check_launch(core::iou_loss_clusters(clusters), "iou_loss");
    return core::iou_loss_partials(pairs, clusters);
  }
};

struct DeformableAttention : Launches<core::launch_deformable_attention, core::launch_deformable_attention_backward> {
  static constexpr bool kBounds = true;
};

using Images = Launches<core::launch_image_augment, core::launch_image_letterbox, core::launch_image_resize>;

struct LinearAssignment : OnDevice {
  static int64_t scratch(int64_t rows, int64_t columns) { return core::assignment_scratch(rows, columns); }
  static void run(const core::LinearAssignmentParams& p, const char* op) {
    constexpr int64_t kMost = INT_MAX / 2;
    TORCH_CHECK(p.problems <= kMost && p.rows <= kMost && p.columns <= kMost, op, ": cost has shape [", p.problems,
                ", ", p.rows, ", ", p.columns, "], but sizes of at most ", kMost, " are expected");
    Launch<core::launch_linear_assignment>::run(p, op);
  }
};

struct Masks : Launches<core::launch_masks, core::launch_crop> {
  // The kernel reads any strides.
  static at::Tensor prototypes(const at::Tensor& protos) {
    return protos.scalar_type() == at::kDouble ? protos.to(at::kFloat) : protos;
  }
};

using Metrics = Launches<core::launch_match, core::launch_confusion>;

struct Pool : OnDevice {
  static void forward(const core::MaxPoolParams& p, const char* op) {
    check_counts(p, op);
    Launch<core::launch_max_pool_forward>::run(p, op);
  }
  static void backward(const core::MaxPoolParams& p, const char* op) {
    check_counts(p, op);
    Launch<core::launch_max_pool_backward>::run(p, op);
  }
};

struct RtdetrLoss : OnDevice {
  static int64_t assignment(int64_t queries, int64_t most) { return core::assignment_scratch(queries, most); }
  static void run(const core::RtdetrLossParams& p) { Launch<core::launch_rtdetr_loss>::run(p, kRtdetrLoss); }
  static void run_backward(const core::RtdetrLossParams& p) {
    Launch<core::launch_rtdetr_loss_backward>::run(p, "rtdetr_loss_backward");
  }
};

using Slices = Launches<core::launch_sum_slices, core::launch_pad_and_sum, core::launch_sum_rows>;

struct Softmax : OnDevice {
  static void run(const core::SoftmaxBackwardParams& p, const char* op) {
    TORCH_CHECK(p.batch * p.rows <= INT_MAX, op, ": ", p.batch * p.rows,
                " rows came, but at most 2147483647 are expected");
    Launch<core::launch_softmax_backward>::run(p, op);
  }
};

struct SpaceToDepth : OnDevice {
  static void forward(const core::SpaceToDepthParams& p, const char* op) {
    check_counts(p.batch * p.deep_height(), p.deep_width() * p.deep_channels, op);
    Launch<core::launch_space_to_depth>::run(p, op);
  }
  static void backward(const core::SpaceToDepthParams& p, const char* op) {
    check_counts(p.batch * p.height, p.width * p.channels, op);
    Launch<core::launch_depth_to_space>::run(p, op);
  }
};

using Upsample = Launches<core::launch_upsample_forward, core::launch_upsample_backward>;

struct V8Loss : Launches<core::launch_v8_loss, core::launch_v8_loss_backward, core::launch_v8_posed_loss,
                         core::launch_v8_masked_loss, core::launch_v8_mask_loss, core::launch_v8_mask_loss_backward,
                         core::launch_v8_keypoint_loss, core::launch_v8_keypoint_loss_backward,
                         core::launch_v8_obb_loss, core::launch_v8_obb_loss_backward> {
  static int64_t slot_blocks(const core::V8LossParams& p) { return core::v8_slot_blocks(p); }
  static int64_t slot_blocks(const core::V8ObbLossParams& p) { return core::v8_obb_slot_blocks(p); }
  static int64_t class_blocks(const core::V8LossParams& p) { return core::v8_class_blocks(p); }
};

struct Yolov5Loss : OnDevice {
  static int64_t match_sums(const core::Yolov5LossParams& p) { return 3 * p.nl * core::yolov5_match_blocks(p); }
  static int64_t scratch(const core::Yolov5LossParams& p) {
    return match_sums(p) + p.nl * core::yolov5_object_blocks(p);
  }
  static void run(core::Yolov5LossParams& p, const at::Tensor& scratch) {
    p.match_partials = scratch.data_ptr();
    p.object_partials = static_cast<char*>(scratch.data_ptr()) + match_sums(p) * scratch.element_size();
    Launch<core::launch_yolov5_loss>::run(p, "yolov5_loss");
  }
  static void run(const core::Yolov5LossBackwardParams& p) {
    Launch<core::launch_yolov5_loss_backward>::run(p, "yolov5_loss_backward");
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CUDA, m) {
  register_boxes<Boxes>(m);
  register_deformable_attention<DeformableAttention>(m);
  register_image<Images>(m);
  register_linear_assignment<LinearAssignment>(m);
  register_masks<Masks>(m);
  register_metrics<Metrics>(m);
  register_pool<Pool>(m);
  register_rtdetr_loss<RtdetrLoss>(m);
  register_slices<Slices>(m);
  register_softmax<Softmax>(m);
  register_space_to_depth<SpaceToDepth>(m);
  register_upsample<Upsample>(m);
  register_v8_loss<V8Loss>(m);
  register_yolov5_loss<Yolov5Loss>(m);
}

}  // namespace torch_fastdet::plain_cuda
