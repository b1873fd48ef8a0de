// Match detections and labels of one image on the CPU.
#pragma once

#include <algorithm>
#include <vector>

#include "core/metrics/metrics_math.h"

namespace torch_fastdet::core {

void match_best(const MatchParams& p, int64_t image) {
  const MatchInput& in = p.in;
  const float* thresholds = p.thresholds;
  const int64_t n = detections_of(in, image), levels = p.threshold_count;
  bool* correct = p.correct + image * in.count * levels;
  for (int64_t l = 0; l < in.label_count; ++l) {
    if (label_is_of(in, image, l)) std::fill_n(p.claims + l * levels, levels, int32_t(-1));
  }
  for (int64_t d = 0; d < n; ++d) {
    float iou;
    const int64_t label = best_label(in, image, d, /*same_class=*/true, &iou);
    if (label < 0) continue;
    for (int64_t t = 0; t < levels; ++t) {
      int32_t& owner = p.claims[label * levels + t];
      if (iou >= thresholds[t] && owner < 0) owner = static_cast<int32_t>(d), correct[d * levels + t] = true;
    }
  }
}

// Return the free label with the greatest IoU, or the earlier one if they are equal, for kGreedy.
template <typename IsFree>
int64_t best_free_label(const MatchInput& in, int64_t image, int64_t index, bool same_class, float* iou,
                        IsFree is_free) {
  const float category = detection_row(in, image, index)[5];
  int64_t best = -1;
  *iou = 0.f;
  for (int64_t l = 0; l < in.label_count; ++l) {
    if (!label_is_of(in, image, l) || !is_free(l)) continue;
    if (same_class && label_row(in, l)[0] != category) continue;
    const float value = overlap(in, image, l, index);
    if (value > *iou) *iou = value, best = l;
  }
  return best;
}

void match_greedy(const MatchParams& p, int64_t image) {
  const MatchInput& in = p.in;
  const float* thresholds = p.thresholds;
  const int64_t n = detections_of(in, image), levels = p.threshold_count;
  bool* correct = p.correct + image * in.count * levels;
  for (int64_t t = 0; t < levels; ++t) {
    std::vector<bool> taken(in.label_count, false);
    for (int64_t d = 0; d < n; ++d) {
      float iou;
      const int64_t label =
          best_free_label(in, image, d, /*same_class=*/true, &iou, [&](int64_t l) { return !taken[l]; });
      if (label < 0 || !(iou >= thresholds[t])) continue;
      taken[label] = true;
      correct[d * levels + t] = true;
    }
  }
}

// Return the detection matched with each label, or -1. Detections at or below the confidence are ignored.
std::vector<int64_t> owners_of_labels(const ConfusionParams& p, int64_t image) {
  const MatchInput& in = p.in;
  const int64_t n = detections_of(in, image);
  const float threshold = p.iou_threshold;
  std::vector<int64_t> owner(in.label_count, -1);
  std::vector owned(in.label_count, 0.f);
  for (int64_t d = 0; d < n; ++d) {
    if (!(detection_row(in, image, d)[4] > p.confidence)) continue;
    float iou;
    const int64_t label = in.rule == MatchRule::kBest ? best_label(in, image, d, /*same_class=*/false, &iou)
                                                      : best_free_label(in, image, d, /*same_class=*/false, &iou,
                                                                        [&](int64_t l) { return owner[l] < 0; });
    if (label >= 0 && iou > threshold && iou >= owned[label]) owner[label] = d, owned[label] = iou;
  }
  return owner;
}

void count_confusion(const ConfusionParams& p, int64_t image) {
  const MatchInput& in = p.in;
  const int64_t n = detections_of(in, image), side = p.classes + 1;
  const std::vector<int64_t> owner = owners_of_labels(p, image);
  std::vector<bool> matched(n, false);
  bool any = false;
  const auto add = [&](int64_t predicted, int64_t truth) {
    if (predicted >= 0 && truth >= 0) ++p.matrix[predicted * side + truth];
  };
  for (int64_t l = 0; l < in.label_count; ++l) {
    if (!label_is_of(in, image, l)) continue;
    const int64_t truth = matrix_class(label_row(in, l)[0], p.classes);
    if (owner[l] < 0) {
      add(p.classes, truth);
      continue;
    }
    any = matched[owner[l]] = true;
    add(matrix_class(detection_row(in, image, owner[l])[5], p.classes), truth);
  }
  // YOLOv5 counts no false positives in an image without a match.
  if (!any && in.rule == MatchRule::kBest) return;
  for (int64_t d = 0; d < n; ++d) {
    const float* detection = detection_row(in, image, d);
    if (detection[4] > p.confidence && !matched[d]) add(matrix_class(detection[5], p.classes), p.classes);
  }
}

}  // namespace torch_fastdet::core
