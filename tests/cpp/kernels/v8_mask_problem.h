// Loops over anchors and pixels compute the mask part of the segmentation loss. The kernels and CPU loops are compared
// with them: layouts, boxes over the border and without area, empty slots, padding; YOLOv5's levels, whose matches
// share anchors.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "core/v8_loss/v8_mask_loss.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::v8_mask_problem {

// Backend has forward(params, rows in use) and backward(params), which return whether they ran.
template <class Backend, typename T>
void check(uint64_t seed, DType dtype) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  const int64_t bs = 1 + random.below(3), topk = random.one_of({1, 3, 10});
  const bool yolov5 = random.chance(40);
  V8MaskLossParams params{};
  const int64_t levels = yolov5 ? 1 + random.below(3) : 1;
  int64_t anchors = 0;
  for (int64_t i = 0; i < levels; ++i) {
    const int64_t columns = 1 + random.below(5), rows = 1 + random.below(4), of_level = 2 * columns * rows;
    params.level[i] = {anchors, of_level, static_cast<float>(columns), static_cast<float>(rows)};
    anchors += of_level;
  }
  if (!yolov5) anchors = random.one_of({1, 5, 84, 300});
  const int64_t height = random.one_of({4, 9, 20}), width = random.one_of({4, 13, 40, 300});
  const int64_t channels = random.one_of({32, 32, 5, 33}), n = random.one_of({0, 1, 4, 9});
  const int64_t used = random.chance(70) ? n : n / 2;
  const bool overlap = random.chance(50), rows = random.chance(50);
  const auto make = [&](std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    Tensor tensor(dtype, sizes, strides, random.below(3));
    for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, 0.3 * random.normal());
    return tensor;
  };
  const std::vector<int64_t> by_anchor = {bs, channels, anchors}, by_pixel = {bs, channels, height, width};
  const std::vector<int64_t> last = {height * width * channels, 1, width * channels, channels};
  const Tensor coefficients = make(by_anchor, Tensor::dense(by_anchor));
  const Tensor protos = make(by_pixel, rows ? last : Tensor::dense(by_pixel));
  Tensor coefficient_gradients =
      make(by_anchor, rows ? std::vector<int64_t>{anchors * channels, 1, channels} : Tensor::dense(by_anchor));
  Tensor proto_gradients = make(by_pixel, rows ? last : Tensor::dense(by_pixel));

  std::vector<float> targets;
  std::vector<int64_t> image_of(n), number_of(n), seen(bs, 0);
  for (int64_t i = 0; i < n; ++i) {
    image_of[i] = i * bs / std::max<int64_t>(n, 1);
    number_of[i] = ++seen[image_of[i]];
    // Edges lie between pixels, some outside the image, so that float32 and float64 agree on what is inside.
    const auto side = [&](int64_t size, float& center, float& length) {
      const double from = static_cast<double>(random.below(size)) - 1.5;
      length = static_cast<float>((1.0 + static_cast<double>(random.below(size))) / static_cast<double>(size));
      center = static_cast<float>(from / static_cast<double>(size) + 0.5 * length);
    };
    float row[6] = {static_cast<float>(image_of[i]), 0};
    side(width, row[2], row[4]);
    side(height, row[3], row[5]);
    targets.insert(targets.end(), row, row + 6);
  }
  std::vector<uint8_t> bytes;
  std::vector<int32_t> integers;
  std::vector<float> floats;
  for (int64_t i = 0; i < (overlap ? bs : n) * height * width; ++i) {
    const int64_t value = overlap ? random.below(6) : random.below(2);
    bytes.push_back(static_cast<uint8_t>(value)), integers.push_back(static_cast<int32_t>(value));
    floats.push_back(overlap ? static_cast<float>(value) : static_cast<float>(value) * 0.75f);
  }
  const int type = static_cast<int>(random.below(3));

  std::vector<int64_t> slot_anchor, slot_row;
  std::vector<char> taken(bs * anchors, 0);
  std::vector<int64_t> group_of, in_group(levels * bs, 0), joined;  // of the slots; `joined`: image * anchors + anchor
  for (int64_t k = 0; yolov5 && k < levels * topk * n; ++k) {
    const int64_t row = k % n, level = k / (topk * n), image = image_of[row];
    const V8MaskLevel& of = params.level[level];
    const int64_t cell = random.below(of.anchors);
    const bool empty = row >= used || random.chance(30);
    slot_anchor.push_back(empty ? -1 : image * of.anchors + cell);
    slot_row.push_back(row);
    joined.push_back(image * anchors + of.first + cell);
    group_of.push_back(level * bs + image);
    in_group[group_of.back()] += empty ? 0 : 1;
  }
  for (int64_t i = 0; !yolov5 && i < n; ++i) {
    for (int64_t k = 0; k < topk; ++k) {
      const int64_t anchor = image_of[i] * anchors + random.below(anchors);
      const bool empty = i >= used || taken[anchor] || random.chance(30);
      if (!empty) taken[anchor] = 1;
      slot_anchor.push_back(empty ? -1 : anchor);
      slot_row.push_back(empty ? -1 : i);
      joined.push_back(anchor);
    }
  }

  V8MaskProblem& p = params.problem;
  p.dtype = dtype;
  p.coefficients = {coefficients.data(), coefficients.strides[0], coefficients.strides[1], coefficients.strides[2]};
  p.protos = {protos.data(), protos.strides[0], protos.strides[1], protos.strides[2], protos.strides[3]};
  p.masks = type == 0   ? static_cast<const void*>(bytes.data())
            : type == 1 ? static_cast<const void*>(integers.data())
                        : static_cast<const void*>(floats.data());
  p.mask_type = static_cast<V8MaskType>(type);
  p.overlap = overlap;
  p.bs = bs, p.anchors = anchors, p.height = height, p.width = width;
  p.channels = static_cast<int32_t>(channels);
  p.levels = static_cast<int32_t>(levels);
  params.image_w = static_cast<float>(4 * width), params.image_h = static_cast<float>(4 * height);
  params.targets = targets.data();
  params.n = n;
  params.num_targets = used == n ? nullptr : &used;
  const std::vector<double> settings = {7.5, 0.5, 1.5, 0.3, 0.5, 6, 1e-9, 16, 16};
  params.settings = yolov5 ? nullptr : settings.data();
  params.gain = 0.05;
  params.slot_anchor = slot_anchor.data(), params.slot_row = yolov5 ? nullptr : slot_row.data();
  params.slots = static_cast<int64_t>(slot_anchor.size());
  std::vector<V8MaskPositive> positives(params.slots);
  std::vector<int64_t> first(levels * bs + 1, 99);
  std::vector<T> unit(params.slots * channels, T(NAN)),
      partials(params.slots * v8_mask_parts(params.slots) * (1 + channels), T(NAN)), results(3, T(NAN));
  std::vector<int32_t> numbers(levels * n, 99);
  params.positives = positives.data(), params.first = first.data();
  params.unit_gradients = unit.data(), params.partials = partials.data(), params.numbers = numbers.data();
  params.loss = &results[0], params.item = &results[1], params.scale = &results[2];
  ASSERT_TRUE(Backend::forward(params, used));

  double total = 0;
  int64_t count = 0;
  for (const int64_t anchor : slot_anchor) count += anchor >= 0 ? 1 : 0;
  const T grad = T(3);
  const double all = yolov5 ? bs : bs * settings[kV8Weight];
  const double scale = !count ? 0 : yolov5 ? params.gain / bs : settings[kV8Box] / count;
  std::vector<double> by_coefficient(coefficients.numel(), 0), by_proto(protos.numel(), 0);
  for (int64_t slot = 0; slot < params.slots; ++slot) {
    if (slot_anchor[slot] < 0) continue;
    const int64_t row = slot_row[slot], image = image_of[row], anchor = joined[slot] % anchors;
    const float* t = targets.data() + 6 * row;
    const double left = (t[2] - 0.5 * t[4]) * width, right = (t[2] + 0.5 * t[4]) * width;
    const double top = (t[3] - 0.5 * t[5]) * height, bottom = (t[3] + 0.5 * t[5]) * height;
    const double share =
        1 / (static_cast<double>(height * width) * t[4] * t[5] * (yolov5 ? in_group[group_of[slot]] : 1));
    for (int64_t y = 0; y < height; ++y) {
      for (int64_t x = 0; x < width; ++x) {
        if (x < left || x >= right || y < top || y >= bottom) continue;
        double logit = 0;
        for (int64_t c = 0; c < channels; ++c) {
          logit += coefficients.get((image * channels + c) * anchors + anchor) *
                   protos.get(((image * channels + c) * height + y) * width + x);
        }
        const int64_t pixel = y * width + x;
        const double wanted =
            overlap ? (integers[image * height * width + pixel] == number_of[row] ? 1 : 0)
                    : (type == 2 ? floats[row * height * width + pixel] : integers[row * height * width + pixel]);
        total += (std::log1p(std::exp(-std::abs(logit))) + std::max(logit, 0.0) - wanted * logit) * share;
        const double gradient = (1 / (1 + std::exp(-logit)) - wanted) * share * scale * all * grad;
        for (int64_t c = 0; c < channels; ++c) {
          const int64_t coefficient = (image * channels + c) * anchors + anchor;
          const int64_t proto = ((image * channels + c) * height + y) * width + x;
          by_coefficient[coefficient] += gradient * protos.get(proto);
          by_proto[proto] += gradient * coefficients.get(coefficient);
        }
      }
    }
  }
  EXPECT_NEAR(results[1], total * scale, 2e-5 * (1 + total * scale));
  EXPECT_NEAR(results[0], total * scale * all, 2e-5 * (1 + total * scale * all));

  V8MaskLossBackwardParams back{};
  back.problem = p;
  back.shared = yolov5 || random.chance(20);
  back.slots = params.slots;
  back.positives = positives.data(), back.first = first.data();
  back.unit_gradients = unit.data(), back.scale = &results[2], back.grad_loss = &grad;
  const auto& s = coefficient_gradients.strides;
  back.coefficient_gradients = {coefficient_gradients.data(), s[0], s[1], s[2]};
  const auto& q = proto_gradients.strides;
  const bool wants_protos = random.chance(80);
  if (wants_protos) back.proto_gradients = {proto_gradients.data(), q[0], q[1], q[2], q[3]};
  ASSERT_TRUE(Backend::backward(back));
  const bool half = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  const auto compare = [&](const Tensor& got, const std::vector<double>& want) {
    double most = 0;
    for (const double value : want) most = std::max(most, std::abs(value));
    for (int64_t i = 0; i < got.numel(); ++i) {
      ASSERT_NEAR(got.get(i), want[i], (half ? 1e-2 : 1e-5) * most + 1e-7) << "element " << i;
    }
    EXPECT_TRUE(got.surroundings_intact());
  };
  compare(coefficient_gradients, by_coefficient);
  if (wants_protos) compare(proto_gradients, by_proto);
}

}  // namespace torch_fastdet::core::v8_mask_problem
