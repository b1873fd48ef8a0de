// Loops compute the keypoint parts of the pose loss. The kernels and CPU loops are compared with them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "core/v8_loss/v8_keypoint_loss.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::v8_keypoint_problem {

// Backend has forward(params) and backward(params), which return whether they ran.
template <class Backend, typename T>
void check(uint64_t seed, DType dtype) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  V8KeypointProblem p{};
  V8Heads& heads = p.heads;
  heads.bs = 1 + random.below(3);
  heads.num_levels = 2;
  heads.levels[0] = {0, 0, 0, 0, 6, 4, 8.f};
  heads.levels[1] = {0, 0, 0, 24, 3, 2, 16.f};
  heads.anchors = 30;
  heads.image_w = 48, heads.image_h = 32;
  p.dtype = dtype;
  p.keypoints = random.one_of({1, 5, 17, 40});
  p.columns = random.one_of({2, 3});
  p.label_columns = random.one_of({2, 3});
  const int64_t n = random.one_of({0, 1, 5, 20}), topk = random.one_of({1, 4}), channels = p.keypoints * p.columns;
  const std::vector<int64_t> sizes = {heads.bs, channels, heads.anchors};
  const std::vector<int64_t> rows = {heads.anchors * channels, 1, channels};
  const auto& layout = random.chance(50) ? rows : Tensor::dense(sizes);
  Tensor predictions(dtype, sizes, layout, random.below(3)), gradient(dtype, sizes, Tensor::dense(sizes), 1);
  for (int64_t i = 0; i < predictions.numel(); ++i) predictions.set(i, random.normal());
  std::vector<float> labels, targets, sigmas;
  for (int k = 0; k < p.keypoints; ++k) sigmas.push_back(0.1f * static_cast<float>(1 + random.below(9)));
  const auto part = [&] { return static_cast<float>(random.below(100)) / 100; };
  for (int64_t i = 0; i < n; ++i) {
    for (int k = 0; k < p.keypoints; ++k) {
      labels.insert(labels.end(), {part(), part()});
      if (p.label_columns == 3) labels.push_back(static_cast<float>(random.below(3)));
    }
    const float row[6] = {static_cast<float>(i % heads.bs), 0, part(), part(), part() + 0.1f, part() + 0.1f};
    targets.insert(targets.end(), row, row + 6);
  }
  std::vector<int64_t> slot_anchor, slot_row;
  std::vector<char> taken(heads.bs * heads.anchors, 0);
  for (int64_t slot = 0; slot < n * topk; ++slot) {
    const int64_t row = slot / topk, anchor = row % heads.bs * heads.anchors + random.below(heads.anchors);
    const bool empty = taken[anchor] || random.chance(30);
    if (!empty) taken[anchor] = 1;
    slot_anchor.push_back(empty ? -1 : anchor);
    slot_row.push_back(empty ? -1 : row);
  }
  p.predictions = predictions.data();
  p.stride_b = layout[0], p.stride_c = layout[1], p.stride_a = layout[2];
  p.labels = labels.data(), p.targets = targets.data(), p.sigmas = sigmas.data();
  p.slot_anchor = slot_anchor.data(), p.slot_row = slot_row.data(), p.slots = n * topk;
  const std::vector<double> settings = {7.5, 0.5, 1.5, 0.3, 0.5, 6, 1e-9, 16, 16}, gains = {12, 1.5};
  std::vector<T> partials(2 * p.slots, T(NAN)), results(6, T(NAN));
  ASSERT_TRUE(
      Backend::forward({p, gains.data(), settings.data(), partials.data(), &results[0], &results[2], &results[4]}));

  double sums[2] = {}, positives = 0;
  for (const int64_t anchor : slot_anchor) positives += anchor >= 0 ? 1 : 0;
  const T grad[3] = {T(2), T(9), T(3)};
  const double all = heads.bs * 0.3;
  std::vector<double> want(predictions.numel(), 0);
  for (int64_t slot = 0; slot < p.slots; ++slot) {
    if (slot_anchor[slot] < 0) continue;
    const int64_t row = slot_row[slot], image = slot_anchor[slot] / 30, anchor = slot_anchor[slot] % 30;
    const bool second = anchor >= 24;
    const double stride = second ? 16 : 8, nx = second ? 3 : 6;
    const double column = second ? (anchor - 24) % 3 : anchor % 6, line = std::floor((anchor - (second ? 24 : 0)) / nx);
    const float* t = targets.data() + 6 * row;
    const double area = t[4] * 48.0 / stride * (t[5] * 32.0 / stride);
    int visible = 0;
    const auto is_visible = [&](int k) { return p.label_columns == 2 || labels[(row * p.keypoints + k) * 3 + 2] != 0; };
    for (int k = 0; k < p.keypoints; ++k) visible += is_visible(k) ? 1 : 0;
    for (int k = 0; k < p.keypoints; ++k) {
      const float* label = labels.data() + (row * p.keypoints + k) * p.label_columns;
      const auto place = [&](int c) { return (image * channels + k * p.columns + c) * 30 + anchor; };
      const double dx = 2 * predictions.get(place(0)) + column - label[0] * 48.0 / stride;
      const double dy = 2 * predictions.get(place(1)) + line - label[1] * 32.0 / stride;
      const double spread = 8.0 * sigmas[k] * sigmas[k] * (area + 1e-9);
      const double e = (dx * dx + dy * dy) / spread, gain = positives ? 1 / (positives * p.keypoints) : 0;
      const double share = is_visible(k) ? p.keypoints / (visible + 1e-9) : 0;
      sums[0] += share * (1 - std::exp(-e)) * gain * gains[0];
      want[place(0)] += share * std::exp(-e) * 4 * dx / spread * gain * gains[0] * all * grad[0];
      want[place(1)] += share * std::exp(-e) * 4 * dy / spread * gain * gains[0] * all * grad[0];
      if (p.columns == 2) continue;
      const double logit = predictions.get(place(2)), seen = is_visible(k) ? 1 : 0;
      sums[1] += (std::log1p(std::exp(-std::abs(logit))) + std::max(logit, 0.0) - seen * logit) * gain * gains[1];
      want[place(2)] += (1 / (1 + std::exp(-logit)) - seen) * gain * gains[1] * all * grad[2];
    }
  }
  for (int k = 0; k < 2; ++k) {
    EXPECT_NEAR(results[2 + k], sums[k], 1e-5 * (1 + sums[k]));
    EXPECT_NEAR(results[k], sums[k] * all, 1e-5 * (1 + sums[k] * all));
  }
  const auto dense = Tensor::dense(sizes);
  ASSERT_TRUE(Backend::backward({p, &results[4], grad, 2, gradient.data(), dense[0], dense[1], dense[2]}));
  const double tolerance = dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 1e-2 : 2e-5;
  for (int64_t i = 0; i < gradient.numel(); ++i) {
    ASSERT_NEAR(gradient.get(i), want[i], tolerance * std::abs(want[i]) + 1e-5) << "element " << i;
  }
  EXPECT_TRUE(gradient.surroundings_intact());
}

}  // namespace torch_fastdet::core::v8_keypoint_problem
