// Detections matched with labels on the CPU: threads over the images.
#include <algorithm>

#include "core/metrics/metrics_loops.h"
#include "ops/common/parallel.h"
#include "ops/metrics/run.h"

namespace torch_fastdet::metrics_cpu {
namespace {

struct Cpu : OnDevice {
  static void run(const core::MatchParams& p, const char*) {
    std::fill_n(p.correct, p.in.images * p.in.count * p.threshold_count, false);
    parallel_for(0, p.in.images, 1, [&](int64_t begin, int64_t end) {
      for (int64_t image = begin; image < end; ++image) {
        p.in.rule == core::MatchRule::kBest ? core::match_best(p, image) : core::match_greedy(p, image);
      }
    });
  }
  // One thread: all images add to one matrix.
  static void run(const core::ConfusionParams& p, const char*) {
    for (int64_t image = 0; image < p.in.images; ++image) core::count_confusion(p, image);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, CPU, m) {
  register_metrics<Cpu>(m);
}

}  // namespace torch_fastdet::metrics_cpu
