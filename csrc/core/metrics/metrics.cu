// Match detections with labels on the GPU, one block per image.
#include "core/metrics/metrics_math.h"

namespace torch_fastdet::core {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

// Run kBest: each detection claims one label, which the first such row gets. Claims count from the last row.
__global__ void __launch_bounds__(kThreads) match_best_kernel(const __grid_constant__ MatchParams p) {
  const MatchInput& in = p.in;
  const int64_t image = blockIdx.x, n = detections_of(in, image), levels = p.threshold_count;
  const float* thresholds = p.thresholds;
  for (int64_t i = threadIdx.x; i < in.label_count * levels; i += kThreads) {
    if (label_is_of(in, image, i / levels)) p.claims[i] = 0;
  }
  __syncthreads();
  int32_t* best = p.best + image * in.count;
  for (int64_t d = threadIdx.x; d < n; d += kThreads) {
    float iou;
    const int64_t label = best_label(in, image, d, /*same_class=*/true, &iou);
    best[d] = static_cast<int32_t>(label);
    for (int64_t t = 0; label >= 0 && t < levels; ++t) {
      if (iou >= thresholds[t]) atomicMax(p.claims + label * levels + t, static_cast<int32_t>(n - d));
    }
  }
  __syncthreads();
  bool* correct = p.correct + image * in.count * levels;
  for (int64_t i = threadIdx.x; i < in.count * levels; i += kThreads) {
    const int64_t d = i / levels;
    // A claim holds a row only if the IoU reached the threshold.
    correct[i] = d < n && best[d] >= 0 && p.claims[best[d] * levels + i % levels] == n - d;
  }
}

// Return the greatest value of a warp and its index in every lane. If values are equal, the lower index wins.
__device__ void warp_argmax(float& value, int64_t& index) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAll, value, step);
    const int64_t other_index = __shfl_xor_sync(kAll, index, step);
    if (other > value || (other == value && other_index < index)) value = other, index = other_index;
  }
}

// Return the best free label, using one warp. Only lane l % 32 reads and writes the state of label l.
template <typename IsFree>
__device__ int64_t best_free_label_of_warp(const MatchInput& in, int64_t image, int64_t index, bool same_class,
                                           float* iou, IsFree is_free) {
  const float category = detection_row(in, image, index)[5];
  float greatest = 0.f;
  int64_t best = INT64_MAX;
  for (int64_t l = threadIdx.x % kWarp; l < in.label_count; l += kWarp) {
    if (!label_is_of(in, image, l) || !is_free(l)) continue;
    if (same_class && label_row(in, l)[0] != category) continue;
    const float value = overlap(in, image, l, index);
    if (value > greatest) greatest = value, best = l;
  }
  warp_argmax(greatest, best);
  *iou = greatest;
  return best == INT64_MAX ? -1 : best;
}

// Run kGreedy: a warp takes a threshold and goes through the detections in order.
__global__ void __launch_bounds__(kThreads) match_greedy_kernel(const __grid_constant__ MatchParams p) {
  const MatchInput& in = p.in;
  const int64_t image = blockIdx.x, n = detections_of(in, image), levels = p.threshold_count;
  const float* thresholds = p.thresholds;
  const int lane = threadIdx.x % kWarp;
  bool* correct = p.correct + image * in.count * levels;
  for (int64_t t = threadIdx.x / kWarp; t < levels; t += kThreads / kWarp) {
    for (int64_t l = lane; l < in.label_count; l += kWarp) {
      if (label_is_of(in, image, l)) p.claims[l * levels + t] = 0;
    }
    for (int64_t d = 0; d < in.count; ++d) {
      bool found = false;
      if (d < n) {
        float iou;
        const int64_t label = best_free_label_of_warp(in, image, d, /*same_class=*/true, &iou,
                                                      [&](int64_t l) { return p.claims[l * levels + t] == 0; });
        found = label >= 0 && iou >= thresholds[t];
        if (found && label % kWarp == lane) p.claims[label * levels + t] = 1;
      }
      if (lane == 0) correct[d * levels + t] = found;
    }
  }
}

// Return the key of a claim on a label. The greater IoU wins, and the later row if they are equal. It is never 0.
TORCH_FASTDET_HOST_DEVICE uint64_t claim_key(float iou, int64_t row) {
  return static_cast<uint64_t>(float_bits(iou)) << 32 | static_cast<uint32_t>(row + 1);
}

__device__ void claim_best_labels(const ConfusionParams& p, int64_t image, int64_t n) {
  const MatchInput& in = p.in;
  for (int64_t d = threadIdx.x; d < n; d += kThreads) {
    if (!(detection_row(in, image, d)[4] > p.confidence)) continue;
    float iou;
    const int64_t label = best_label(in, image, d, /*same_class=*/false, &iou);
    if (label < 0 || !(iou > p.iou_threshold)) continue;
    atomicMax(reinterpret_cast<unsigned long long*>(p.claims + label),
              static_cast<unsigned long long>(claim_key(iou, d)));
  }
}

__device__ void claim_free_labels(const ConfusionParams& p, int64_t image, int64_t n) {
  if (threadIdx.x >= kWarp) return;
  const MatchInput& in = p.in;
  for (int64_t d = 0; d < n; ++d) {
    if (!(detection_row(in, image, d)[4] > p.confidence)) continue;
    float iou;
    const int64_t label =
        best_free_label_of_warp(in, image, d, /*same_class=*/false, &iou, [&](int64_t l) { return p.claims[l] == 0; });
    if (label < 0 || !(iou > p.iou_threshold)) continue;
    if (label % kWarp == threadIdx.x) p.claims[label] = claim_key(iou, d);
  }
}

__global__ void __launch_bounds__(kThreads) confusion_kernel(const __grid_constant__ ConfusionParams p) {
  const MatchInput& in = p.in;
  const int64_t image = blockIdx.x, n = detections_of(in, image), side = p.classes + 1;
  int32_t* matched = p.matched + image * in.count;
  for (int64_t l = threadIdx.x; l < in.label_count; l += kThreads) {
    if (label_is_of(in, image, l)) p.claims[l] = 0;
  }
  for (int64_t d = threadIdx.x; d < n; d += kThreads) matched[d] = 0;
  __syncthreads();
  if (in.rule == MatchRule::kBest) {
    claim_best_labels(p, image, n);
  } else {
    claim_free_labels(p, image, n);
  }
  __syncthreads();
  const auto add = [&](int64_t predicted, int64_t truth) {
    if (predicted < 0 || truth < 0) return;
    atomicAdd(reinterpret_cast<unsigned long long*>(p.matrix + predicted * side + truth), 1ull);
  };
  bool matches = false;
  for (int64_t l = threadIdx.x; l < in.label_count; l += kThreads) {
    if (!label_is_of(in, image, l)) continue;
    const int64_t truth = matrix_class(label_row(in, l)[0], p.classes);
    const int64_t owner = static_cast<int64_t>(p.claims[l] & 0xffffffffu) - 1;
    if (owner < 0) {
      add(p.classes, truth);
      continue;
    }
    matches = true;
    matched[owner] = 1;
    add(matrix_class(detection_row(in, image, owner)[5], p.classes), truth);
  }
  // YOLOv5 counts no false positives in an image without a match.
  if (!__syncthreads_or(matches) && in.rule == MatchRule::kBest) return;
  for (int64_t d = threadIdx.x; d < n; d += kThreads) {
    const float* detection = detection_row(in, image, d);
    if (detection[4] > p.confidence && !matched[d]) add(matrix_class(detection[5], p.classes), p.classes);
  }
}

}  // namespace

cudaError_t launch_match(const MatchParams& params, cudaStream_t stream) {
  if (params.in.images == 0 || params.in.count == 0 || params.threshold_count == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>(params.in.images);
  if (params.in.rule == MatchRule::kBest) {
    match_best_kernel<<<blocks, kThreads, 0, stream>>>(params);
  } else {
    match_greedy_kernel<<<blocks, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t launch_confusion(const ConfusionParams& params, cudaStream_t stream) {
  if (params.in.images == 0) return cudaSuccess;
  confusion_kernel<<<static_cast<unsigned>(params.in.images), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace torch_fastdet::core
