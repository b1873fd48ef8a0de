// Loops over levels, anchors, targets and cells compute the YOLOv5 loss. The kernels and CPU loops are compared with
// them: layouts, unaligned heads, shared cells, faults.
#pragma once

#include <gtest/gtest.h>

#include "core/yolov5_loss/yolov5_loss.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::yolov5_problem {

// Return the strides of (bs, na, ny, nx, no) in one of the layouts.
inline std::vector<int64_t> strides_of(Yolov5Layout layout, const std::vector<int64_t>& size) {
  const int64_t na = size[1], ny = size[2], nx = size[3], no = size[4];
  if (layout == Yolov5Layout::kAnchorRows) return Tensor::dense(size);
  if (layout == Yolov5Layout::kCellRows) return {ny * nx * na * no, no, nx * na * no, na * no, 1};
  return {na * no * ny * nx, no * ny * nx, nx, 1, ny * nx};
}

// Backend::forward(params, rows of targets in use) and backward(params) return whether they ran; kFaults says whether
// they accept rows that cannot be used.
template <class Backend, typename T>
void check(uint64_t seed, DType dtype) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  Yolov5LossParams p{};
  p.dtype = dtype;
  p.nl = 1 + static_cast<int>(random.below(3));
  p.na = 1 + static_cast<int>(random.below(3));
  p.nc = random.one_of({1, 2, 40, 150});
  p.no = 5 + p.nc;
  p.bs = 1 + random.below(3);
  p.nt = random.one_of({0, 1, 9, 33, 70});
  std::vector<Tensor> logits, gradients;
  std::vector<std::vector<int64_t>> sizes;
  int64_t cells = 0;
  for (int level = 0; level < p.nl; ++level) {
    Yolov5Head& head = p.heads[level];
    head.ny = 1 + random.below(p.nc > 100 ? 3 : 9);
    head.nx = random.one_of({1, 4, 7, 8});
    const std::vector<int64_t> size = {p.bs, p.na, head.ny, head.nx, p.no};
    sizes.push_back(size);
    head.layout = random.one_of({Yolov5Layout::kAnchorRows, Yolov5Layout::kCellRows, Yolov5Layout::kPlanes});
    const auto lies = random.one_of({head.layout, Yolov5Layout::kAnchorRows, Yolov5Layout::kPlanes});
    const std::vector<int64_t> s = strides_of(lies, size);
    Tensor& tensor = logits.emplace_back(dtype, size, s, random.below(3));
    for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, 2 * random.normal());
    gradients.emplace_back(dtype, size, strides_of(head.layout, size), random.chance(70) ? 0 : 1 + random.below(3));
    head.dense = lies == head.layout;
    head.logits = tensor.data();
    head.stride_b = s[0], head.stride_a = s[1], head.stride_y = s[2], head.stride_x = s[3], head.stride_o = s[4];
    head.first_cell = cells;
    head.cells = p.bs * p.na * head.ny * head.nx;
    cells += head.cells;
  }
  std::vector<float> targets;
  const bool crowded = random.chance(50), faulty = random.chance(30) && Backend::kFaults;
  for (int64_t t = 0; t < p.nt; ++t) {
    const auto part = [&] {
      return static_cast<float>(crowded ? random.below(3) : random.below(65)) / (crowded ? 8 : 64);
    };
    float row[6] = {static_cast<float>(random.below(p.bs)),
                    static_cast<float>(random.below(p.nc)),
                    part(),
                    part(),
                    0.1f + part() / 2,
                    0.1f + part() / 2};
    if (faulty && random.chance(20)) row[random.below(6)] = random.one_of({-1.f, 1e9f, std::nanf("")});
    targets.insert(targets.end(), row, row + 6);
  }
  std::vector<float> anchors;
  for (int i = 0; i < p.nl * p.na * 2; ++i) anchors.push_back(0.5f + static_cast<float>(random.below(6)));
  const std::vector<double> balance = {4.0, 1.0, 0.4};
  const int64_t num_targets = random.one_of({p.nt, p.nt / 2, p.nt + 5, int64_t{-2}});
  const int64_t used = std::clamp(num_targets, int64_t{0}, p.nt);
  p.targets = targets.data();
  p.num_targets = random.chance(50) || used != p.nt ? &num_targets : nullptr;
  p.anchors = anchors.data();
  p.balance = balance.data();
  p.box = 0.05, p.obj = 1.0, p.cls = 0.5, p.cls_pw = 1.25, p.obj_pw = 0.75;
  p.positive = 0.95, p.negative = 0.05;
  p.fl_gamma = random.chance(30) ? 1.5 : 0;
  p.gr = random.one_of({1.0, 0.5});
  p.anchor_t = 4;
  p.sort_obj_iou = random.chance(50);

  const int64_t slots = kYolov5CellOffsets * p.na * p.nt;
  std::vector<uint64_t> owner(cells + kYolov5StatusSize, ~uint64_t{0});
  std::vector<int64_t> match_cell(p.nl * slots, -7);
  std::vector<T> match_values(p.nl * slots * 5, T(NAN)), object_gradient(cells, T(NAN)), levels(p.nl * 4, T(NAN));
  std::vector<T> match_partials(p.nl * Backend::match_blocks(p) * 3, T(NAN));
  std::vector<T> object_partials(p.nl * Backend::object_blocks(p), T(NAN)), items(3), loss(1);
  p.state = {owner.data(), match_cell.data(), match_values.data(), object_gradient.data(), levels.data()};
  p.match_partials = match_partials.data();
  p.object_partials = object_partials.data();
  p.items = items.data();
  p.loss = loss.data();
  p.status = reinterpret_cast<int64_t*>(owner.data() + cells);
  ASSERT_TRUE(Backend::forward(p, used));

  double box_loss = 0, object_loss = 0, class_loss = 0;
  int64_t faults = 0, first_fault = 0;
  std::vector<std::vector<double>> want_gradients;  // of the loss times grad_loss
  const T grad_loss = T(3);
  for (int64_t t = 0; t < used; ++t) {
    const int fault = yolov5_target_fault(targets.data() + 6 * t, p.bs, p.nc);
    if (!fault) continue;
    if (!faults++) first_fault = kYolov5FirstFault - (6 * t + fault - 1);
  }
  for (int level = 0; level < p.nl; ++level) {
    const Yolov5Head& head = p.heads[level];
    const auto logit = [&](int64_t b, int64_t a, int64_t y, int64_t x, int64_t o) {
      return static_cast<T>(logits[level].get((((b * p.na + a) * head.ny + y) * head.nx + x) * p.no + o));
    };
    struct Match {
      int64_t slot, label;
      Yolov5Box<T> box;
      uint64_t key;
    };
    std::vector<std::vector<Match>> of_cell(head.cells);
    double box_sum = 0, class_sum = 0;
    int64_t matches = 0;
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int64_t t = slot % p.nt, a = slot / p.nt % p.na, offset = slot / p.nt / p.na;
      const float* row = targets.data() + 6 * t;
      const float* anchor = anchors.data() + (level * p.na + a) * 2;
      Yolov5Match match{};
      if (t < used && !yolov5_target_fault(row, p.bs, p.nc)) {
        match = yolov5_match(row + 2, anchor, head.nx, head.ny, p.anchor_t, static_cast<int>(offset));
      }
      int64_t cell = -1;
      Yolov5Box<T> box{};
      if (match.matched) {
        const auto b = static_cast<int64_t>(row[0]);
        cell = yolov5_cell_number(head, p.na, {b, a, match.y, match.x});
        T four[4];
        for (int i = 0; i < 4; ++i) four[i] = logit(b, a, match.y, match.x, i);
        box = yolov5_box(four, match, anchor);
        of_cell[cell].push_back(
            {slot, static_cast<int64_t>(row[1]), box, yolov5_key(p.sort_obj_iou, static_cast<float>(box.ciou), slot)});
        box_sum += 1 - box.ciou;
        ++matches;
        for (int c = 0; p.nc > 1 && c < p.nc; ++c) {
          const T wanted = T(c == static_cast<int>(row[1]) ? p.positive : p.negative);
          class_sum +=
              binary_cross_entropy(logit(b, a, match.y, match.x, 5 + c), wanted, T(p.cls_pw), T(p.fl_gamma)).value;
        }
      }
      const int64_t index = level * slots + slot;
      ASSERT_EQ(match_cell[index], cell);
      const T objectness = match.matched ? yolov5_objectness_target(box.ciou, T(p.gr)) : T(0);
      ASSERT_EQ(match_values[5 * index], objectness);
      for (int i = 0; i < 4; ++i) ASSERT_EQ(match_values[5 * index + 1 + i], box.gradient[i]);
    }
    const double box_scale = matches ? p.box / matches : 0, object_scale = p.obj * balance[level];
    const double class_scale = matches && p.nc > 1 ? p.cls / (matches * p.nc) : 0;
    std::vector<double>& want = want_gradients.emplace_back(gradients[level].numel());
    double object_sum = 0;
    for (int64_t cell = 0; cell < head.cells; ++cell) {
      const auto& mine = of_cell[cell];
      uint64_t key = 0;
      for (const Match& match : mine) key = std::max(key, match.key);
      ASSERT_EQ(owner[head.first_cell + cell], key | (mine.size() > 1 ? kYolov5Shared : 0)) << "cell " << cell;
      const Yolov5Cell at = yolov5_cell(head, p.na, cell);
      const T target = key ? match_values[5 * (level * slots + yolov5_key_slot(key))] : T(0);
      const auto entropy = binary_cross_entropy(logit(at.b, at.a, at.y, at.x, 4), target, T(p.obj_pw), T(p.fl_gamma));
      ASSERT_EQ(object_gradient[head.first_cell + cell], entropy.gradient);
      object_sum += entropy.value;
      double* row = want.data() + (((at.b * p.na + at.a) * head.ny + at.y) * head.nx + at.x) * p.no;
      row[4] = grad_loss * p.bs * object_scale / head.cells * entropy.gradient;
      for (const Match& match : mine) {
        for (int i = 0; i < 4; ++i) row[i] += grad_loss * p.bs * box_scale * match.box.gradient[i];
        for (int c = 0; p.nc > 1 && c < p.nc; ++c) {
          const T wanted = T(c == match.label ? p.positive : p.negative);
          row[5 + c] +=
              grad_loss * p.bs * class_scale *
              binary_cross_entropy(logit(at.b, at.a, at.y, at.x, 5 + c), wanted, T(p.cls_pw), T(p.fl_gamma)).gradient;
        }
      }
    }
    box_loss += box_scale * box_sum;
    class_loss += class_scale * class_sum;
    object_loss += object_scale * object_sum / head.cells;
  }
  const auto near = [](double got, double want) { EXPECT_NEAR(got, want, 2e-5 * (1 + std::abs(want))); };
  near(items[0], box_loss);
  near(items[1], object_loss);
  near(items[2], class_loss);
  near(loss[0], (box_loss + object_loss + class_loss) * p.bs);
  EXPECT_EQ(p.status[0], faults);
  EXPECT_EQ(p.status[1], first_fault);
  const bool fits = num_targets >= 0 && num_targets <= p.nt;
  EXPECT_EQ(p.status[2], Backend::kFaults && p.num_targets && !fits ? num_targets - p.nt : 0);

  Yolov5LossBackwardParams b{};
  b.dtype = dtype, b.nl = p.nl, b.na = p.na, b.nc = p.nc, b.no = p.no, b.bs = p.bs;
  b.targets = p.targets, b.nt = p.nt, b.cls_pw = p.cls_pw, b.positive = p.positive, b.negative = p.negative;
  b.fl_gamma = p.fl_gamma, b.state = p.state, b.grad_loss = &grad_loss;
  for (int level = 0; level < p.nl; ++level) {
    b.heads[level] = p.heads[level];
    b.heads[level].gradient = gradients[level].data();
  }
  ASSERT_TRUE(Backend::backward(b));
  const double tolerance = dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 1e-2 : 1e-4;
  for (int level = 0; level < p.nl; ++level) {
    for (int64_t i = 0; i < gradients[level].numel(); ++i) {
      const double want = want_gradients[level][i];
      ASSERT_NEAR(gradients[level].get(i), want, tolerance * std::abs(want) + 1e-6) << "level " << level << ", " << i;
    }
    EXPECT_TRUE(gradients[level].surroundings_intact());
  }
}

}  // namespace torch_fastdet::core::yolov5_problem
