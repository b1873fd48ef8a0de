// Register families that only run the core's loops on Torch's threads. The others have a cpu.cpp of their own.
#include <algorithm>
#include <vector>

#include "core/deformable_attention/deformable_attention_loops.h"
#include "core/linear_assignment/linear_assignment_loops.h"
#include "core/masks/masks_loops.h"
#include "core/metrics/metrics_loops.h"
#include "core/pool/max_pool_loops.h"
#include "core/rtdetr_loss/rtdetr_loss_loops.h"
#include "core/slices/slices_loops.h"
#include "core/softmax/softmax_loops.h"
#include "core/space_to_depth/space_to_depth_loops.h"
#include "core/stem_conv/stem_conv_loops.h"
#include "ops/common/dispatch.h"
#include "ops/common/parallel.h"
#include "ops/deformable_attention/run.h"
#include "ops/linear_assignment/run.h"
#include "ops/masks/run.h"
#include "ops/metrics/run.h"
#include "ops/pool/run.h"
#include "ops/rtdetr_loss/run.h"
#include "ops/slices/run.h"
#include "ops/softmax/run.h"
#include "ops/space_to_depth/run.h"
#include "ops/stem_conv/run.h"

namespace torch_fastdet::plain_cpu {
namespace {

struct DeformableAttention : OnDevice {
  static constexpr bool kBounds = false;
  static void run(const core::DeformableAttentionParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::deformable_loops::forward<decltype(zero)>(p, parallel_for); });
  }
  static void run(const core::DeformableAttentionBackwardParams& p, const char*) {
    with_dtype(p.forward.dtype, [&](auto zero) { core::deformable_loops::backward<decltype(zero)>(p, parallel_for); });
  }
};

// Raise at once for a problem that cannot be solved.
struct LinearAssignment : OnDevice {
  static int64_t scratch(int64_t, int64_t) { return 0; }
  static void run(const core::LinearAssignmentParams& p, const char* op) {
    std::vector<core::AssignmentFault> faults(p.problems);
    with_dtype(p.dtype, [&](auto zero) {
      core::assignment_loops::linear_assignment<decltype(zero)>(p, faults.data(), parallel_for);
    });
    std::fill_n(p.status, core::kAssignmentStatusSize, 0);
    for (int64_t n = 0; n < p.problems; ++n) {
      TORCH_CHECK_VALUE(faults[n] != core::AssignmentFault::kColumns, op, ": columns[", n, "] is ", p.used_columns[n],
                        ", but 0 to ", p.columns, " are expected");
      TORCH_CHECK_VALUE(faults[n] != core::AssignmentFault::kCost, op, ": cost[", n,
                        "] has a value of NaN or -inf, but numbers or inf are expected");
      TORCH_CHECK_VALUE(faults[n] != core::AssignmentFault::kInfinite, op, ": cost[", n,
                        "] has no assignment of a finite cost");
    }
  }
};

struct Masks : OnDevice {
  // The loops read float32 rows.
  static at::Tensor prototypes(const at::Tensor& protos) { return dense_float_rows(protos); }
  static void run(const core::MasksParams& p, const char*) {
    const core::MaskTables tables(p);
    parallel_for(0, core::mask_bands(p), 1,
                 [&](int64_t begin, int64_t end) { core::mask_bands_between(p, tables, begin, end); });
  }
  static void run(const core::CropParams& p, const char*) {
    const auto crop = [&](auto zero) {
      parallel_for(0, p.count * p.height, std::max(1, 32768 / p.width),
                   [&](int64_t begin, int64_t end) { core::crop_rows<decltype(zero)>(p, begin, end); });
    };
    p.integer_bytes ? core::with_integer(p.integer_bytes, crop) : with_dtype(p.dtype, crop);
  }
};

struct Metrics : OnDevice {
  static void run(const core::MatchParams& p, const char*) {
    std::fill_n(p.correct, p.in.images * p.in.count * p.threshold_count, false);
    parallel_for(0, p.in.images, 1, [&](int64_t begin, int64_t end) {
      for (int64_t image = begin; image < end; ++image) {
        p.in.rule == core::MatchRule::kBest ? core::match_best(p, image) : core::match_greedy(p, image);
      }
    });
  }
  // Use one thread, as all images add to one matrix.
  static void run(const core::ConfusionParams& p, const char*) {
    for (int64_t image = 0; image < p.in.images; ++image) core::count_confusion(p, image);
  }
};

struct Pool : OnDevice {
  static void forward(const core::MaxPoolParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::pool_loops::forward<decltype(zero)>(p, parallel_for); });
  }
  static void backward(const core::MaxPoolParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::pool_loops::backward<decltype(zero)>(p, parallel_for); });
  }
};

// Raise at once for a bad target.
struct RtdetrLoss : OnDevice {
  static int64_t assignment(int64_t, int64_t) { return 0; }
  static void run(const core::RtdetrLossParams& p) {
    for (int64_t image = 0; image < p.images; ++image) {
      TORCH_CHECK_VALUE(p.counts[image] >= 0 && p.counts[image] <= p.most, kRtdetrLoss, ": counts[", image, "] is ",
                        p.counts[image], ", but 0 to ", p.most, " are expected");
      for (int64_t row = 0; row < p.counts[image]; ++row) {
        TORCH_CHECK_VALUE(p.class_of(image, row) >= 0, kRtdetrLoss, ": targets[", image, ", ", row, "] has class ",
                          p.targets[(image * p.most + row) * 5], ", but 0 to ", p.classes - 1, " are expected");
      }
    }
    std::fill_n(p.status, core::kRtdetrStatusSize, 0);
    with_dtype(p.dtype, [&](auto zero) { core::rtdetr_loops::forward<decltype(zero)>(p, parallel_for); });
  }
  static void run_backward(const core::RtdetrLossParams& p) {
    with_dtype(p.dtype, [&](auto zero) { core::rtdetr_loops::backward<decltype(zero)>(p, parallel_for); });
  }
};

struct Slices : OnDevice {
  static void run(const core::SumSlicesParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::slices_loops::sum_slices<decltype(zero)>(p, parallel_for); });
  }
  static void run(const core::PadAndSumParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::slices_loops::pad_and_sum<decltype(zero)>(p, parallel_for); });
  }
  static void run(const core::SumRowsParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::slices_loops::sum_rows<decltype(zero)>(p, parallel_for); });
  }
};

struct Softmax : OnDevice {
  static void run(const core::SoftmaxBackwardParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) { core::softmax_loops::softmax_backward<decltype(zero)>(p, parallel_for); });
  }
};

struct SpaceToDepth : OnDevice {
  static void forward(const core::SpaceToDepthParams& p, const char*) {
    with_dtype(p.target_dtype, [&](auto to) {
      const auto run = [&](auto from) {
        core::space_to_depth_loops::forward<decltype(from), decltype(to)>(p, parallel_for);
      };
      p.bytes ? run(uint8_t{}) : with_dtype(p.source_dtype, run);
    });
  }
  static void backward(const core::SpaceToDepthParams& p, const char*) {
    with_dtype(p.target_dtype, [&](auto to) {
      with_dtype(p.source_dtype, [&](auto from) {
        core::space_to_depth_loops::backward<decltype(from), decltype(to)>(p, parallel_for);
      });
    });
  }
};

// Threads share the rows of the result, or the outputs whose weights have a gradient.
struct StemConv : OnDevice {
  static void forward(const core::StemConvForwardParams& p, const char*) {
    with_dtype(p.dtype, [&](auto zero) {
      parallel_for(0, p.sizes.batch * p.sizes.height, 1,
                   [&](int64_t begin, int64_t end) { core::stem_conv_forward_rows<decltype(zero)>(p, begin, end); });
    });
  }
  static void backward(core::StemConvBackwardParams& p, const at::TensorOptions&, const char*) {
    with_dtype(p.dtype, [&](auto zero) {
      parallel_for(0, p.sizes.outputs, 1, [&](int64_t begin, int64_t end) {
        core::stem_conv_backward_outputs<decltype(zero)>(p, begin, end);
      });
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_deformable_attention<DeformableAttention>(m);
  register_linear_assignment<LinearAssignment>(m);
  register_masks<Masks>(m);
  register_metrics<Metrics>(m);
  register_pool<Pool>(m);
  register_rtdetr_loss<RtdetrLoss>(m);
  register_slices<Slices>(m);
  register_softmax<Softmax>(m);
  register_space_to_depth<SpaceToDepth>(m);
  register_stem_conv<StemConv>(m);
}

}  // namespace torch_fastdet::plain_cpu
