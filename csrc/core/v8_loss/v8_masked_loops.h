// Compute the mask overlaps of YOLO26's segmentation on the CPU, before the assignment of its detection loss.
#pragma once

#include "core/v8_loss/v8_loss_loops.h"
#include "core/v8_loss/v8_mask_loops.h"
#include "core/v8_loss/v8_masked_loss.h"

namespace torch_fastdet::core::v8_loops {

// Targets and boxes must be prepared. `count` is the number of valid rows of targets.
template <typename scalar_t, typename ParallelFor>
void compare_masks(const V8MaskedLossParams& params, int64_t count, const ParallelFor& parallel_for) {
  using T = arithmetic_t<scalar_t>;
  const V8Heads& heads = params.heads;
  const V8MaskProblem& p = params.masks;
  std::vector<int32_t> last(heads.bs, 0);
  for (int64_t row = 0; row < count; ++row) {
    const int64_t image = v8_row_image(params.targets, row, heads.bs);
    if (image >= 0) params.mask_number[row] = ++last[image];
  }
  parallel_for(0, params.scratch.first_target[heads.bs], 1, [&](int64_t begin, int64_t end) {
    MaskRow<T> pixels(p);
    std::vector<uint64_t> keys;
    std::vector<T> coefficients(p.channels);
    for (int64_t t = begin; t < end; ++t) {
      const V8Target& target = params.scratch.targets[t];
      const auto wanted = [&](int64_t y, int64_t x) {
        return v8_near_mask(params, target.image, target.row, params.mask_number[target.row], y, x);
      };
      double area = 0;
      for (int64_t y = 0; y < p.height; ++y) {
        for (int64_t x = 0; x < p.width; ++x) area += static_cast<double>(wanted(y, x));
      }
      best_keys(params, target, params.near, keys,
                [&](const V8Anchor& at) { return v8_near_key<scalar_t>(params, target, at); });
      for (int64_t i = 0; i < params.near; ++i) {
        const int64_t place = target.row * params.near + i;
        params.near_anchor[place] = -1;
        if (i >= static_cast<int64_t>(keys.size())) continue;
        const int64_t anchor = target.image * heads.anchors + v8_key_index(keys[i]);
        const V8Pixels box = v8_box_pixels(params, static_cast<const CornerBox<T>*>(params.scratch.boxes)[anchor]);
        load_coefficients<scalar_t>(p, {anchor}, coefficients.data());
        double both = 0, predicted = 0;
        for (int64_t y = box.y0; y < box.y1; ++y) {
          pixels.template load<scalar_t>(target.image, y, box.x0, box.x1);
          const T* logits = pixels.logits(coefficients.data(), box.x0, box.x1);
          for (int64_t x = box.x0; x < box.x1; ++x) {
            if (!(logits[x] > T(0))) continue;
            predicted += 1;
            both += static_cast<double>(wanted(y, x));
          }
        }
        params.near_anchor[place] = anchor % heads.anchors;
        static_cast<T*>(params.near_overlap)[place] = static_cast<T>(v8_mask_iou(both, predicted, area));
      }
    }
  });
}

template <typename scalar_t, typename ParallelFor>
void masked_forward(const V8MaskedLossParams& params, int64_t count, const ParallelFor& parallel_for) {
  prepare_targets(params, count);
  decode_boxes<scalar_t>(params, parallel_for);
  compare_masks<scalar_t>(params, count, parallel_for);
  assign<scalar_t>(params, parallel_for);
  resolve<scalar_t>(params, parallel_for);
  filter<arithmetic_t<scalar_t>>(params);
  add_up<scalar_t>(params, parallel_for);
}

}  // namespace torch_fastdet::core::v8_loops
