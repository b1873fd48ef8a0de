// Loops over images, targets and all anchors compute the v8 detection loss. The kernels and CPU loops are compared with
// them: layouts, unaligned tensors, anchors that several targets want, lists longer than a warp, padding.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "core/v8_loss/v8_loss.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::v8_problem {

// Hold a problem and the tensors that its parameters point to.
template <typename T>
struct Problem {
  V8Heads heads{};
  std::vector<Tensor> logits, gradients;  // (bs, channels, ny, nx)
  std::vector<float> targets;
  std::vector<double> settings;
  std::vector<T> weights;
  int64_t n = 0, used = 0, claimed = 0;
  int topk = 0, topk2 = 0;

  T logit(int64_t b, int tensor, int64_t channel, int64_t anchor) const {
    const V8Tensor& t = heads.tensors[tensor];
    return static_cast<T>(logits[tensor].get((b * t.channels + channel) * t.anchors + anchor));
  }
  T box_logit(int64_t b, const V8Anchor& at, int side, int bin) const {
    const V8Level& level = heads.levels[at.level];
    return logit(b, level.boxes, side * heads.reg_max + bin, level.first_in_tensor + at.index);
  }
  T class_logit(int64_t b, const V8Anchor& at, int label) const {
    const V8Level& level = heads.levels[at.level];
    return logit(b, level.classes, heads.tensors[level.classes].box_channels + label, level.first_in_tensor + at.index);
  }
  T weight(int label) const { return weights.empty() ? T(1) : weights[label]; }
  V8Side<T> side(int64_t b, const V8Anchor& at, int which) const {
    return v8_side<T>(heads.reg_max, [&](int bin) { return box_logit(b, at, which, bin); });
  }
};

template <typename T>
void add_tensor(Problem<T>& p, Random& random, DType dtype, int64_t ny, int64_t nx, int channels, int box_channels) {
  V8Tensor& t = p.heads.tensors[p.heads.num_tensors++];
  t.channels = channels;
  t.box_channels = box_channels;
  t.anchors = ny * nx;
  t.width = nx;
  const std::vector<int64_t> size = {p.heads.bs, channels, ny, nx};
  const std::vector<int64_t> planes = Tensor::dense(size), rows = {ny * nx * channels, 1, nx * channels, channels};
  t.layout = random.chance(50) ? V8Layout::kRows : V8Layout::kPlanes;
  t.dense = random.chance(70);
  const auto& dense = t.layout == V8Layout::kRows ? rows : planes;
  const std::vector<int64_t> padded = {channels * ny * (nx + 1), ny * (nx + 1), nx + 1, 1};
  const auto& s = t.dense ? dense : padded;
  Tensor& tensor = p.logits.emplace_back(dtype, size, s, random.chance(70) ? 0 : 1 + random.below(3));
  for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, 2 * random.normal() + 0.5);
  p.gradients.emplace_back(dtype, size, dense, random.chance(70) ? 0 : 1 + random.below(3));
  t.logits = tensor.data();
  t.stride_b = s[0], t.stride_c = s[1], t.stride_y = s[2], t.stride_x = s[3];
}

template <typename T>
Problem<T> make_problem(Random& random, DType dtype, bool faults) {
  Problem<T> p;
  V8Heads& heads = p.heads;
  heads.dtype = dtype;
  heads.bs = 1 + random.below(3);
  heads.nc = random.one_of({1, 3, 8, 40});
  heads.reg_max = random.one_of({16, 16, 1, 4});
  heads.num_levels = 1 + static_cast<int>(random.below(3));
  const bool joined = random.chance(50);
  const int boxes = 4 * heads.reg_max;
  int64_t ny = 4 * (1 + random.below(3)), nx = random.one_of({4, 8, 12, 20});
  float stride = 8;
  heads.image_w = static_cast<float>(nx) * stride;
  heads.image_h = static_cast<float>(ny) * stride;
  for (int i = 0; i < heads.num_levels; ++i, ny /= 2, nx /= 2, stride *= 2) {
    heads.levels[i] = {joined ? 0 : i, joined ? 1 : i, joined ? heads.anchors : 0, heads.anchors, nx, ny, stride};
    if (!joined) add_tensor(p, random, dtype, ny, nx, boxes + heads.nc, boxes);
    heads.anchors += ny * nx;
  }
  if (joined) {
    add_tensor(p, random, dtype, 1, heads.anchors, boxes, boxes);
    add_tensor(p, random, dtype, 1, heads.anchors, heads.nc, 0);
  }
  p.n = random.one_of({0, 1, 7, 40, 300});
  p.claimed = faults ? random.one_of({p.n, p.n, p.n / 2, p.n + 3, int64_t{-1}}) : random.one_of({p.n, p.n / 2});
  p.used = std::clamp(p.claimed, int64_t{0}, p.n);
  const bool faulty = faults && random.chance(25);
  for (int64_t i = 0; i < p.n; ++i) {
    const auto part = [&] { return static_cast<float>(random.below(65)) / 64; };
    const bool tiny = random.chance(30);
    float row[6] = {static_cast<float>(random.below(heads.bs)),
                    static_cast<float>(random.below(heads.nc)),
                    part() * 1.2f - 0.1f,
                    part(),
                    tiny ? 0.01f : part(),
                    tiny ? 0.02f : part()};
    if (faulty && random.chance(15)) row[random.below(6)] = random.one_of({-70.f, 1e9f, std::nanf("")});
    p.targets.insert(p.targets.end(), row, row + 6);
  }
  p.settings = {7.5,
                0.5,
                1.5,
                random.one_of({1.0, 0.3}),
                random.one_of({0.5, 1.0}),
                random.one_of({6.0, 2.0}),
                1e-9,
                16,
                random.one_of({16.0, 8.0})};
  if (random.chance(40)) {
    for (int c = 0; c < heads.nc; ++c) p.weights.push_back(T(0.5 + random.below(4)));
  }
  p.topk = random.one_of({10, 10, 7, 1, 40});
  p.topk2 = random.one_of({p.topk, p.topk, 1, 3});
  return p;
}

// Hold the target that an anchor gets, and its score.
template <typename T>
struct Got {
  V8Target target;
  T alignment, overlap, score;
};

template <typename T>
std::map<int64_t, Got<T>> assign_image(const Problem<T>& p, int64_t image) {
  const V8Heads& heads = p.heads;
  std::vector<V8Target> targets;
  for (int64_t i = 0; i < p.used; ++i) {
    V8Target target;
    const float* row = p.targets.data() + 6 * i;
    if (v8_target_fault(row, heads.bs, heads.nc)) continue;
    if (!v8_target(row, heads.image_w, heads.image_h, v8_sides(p.settings.data()), heads.nc, target) ||
        target.image != image)
      continue;
    target.row = static_cast<int32_t>(i);
    targets.push_back(target);
  }
  const auto overlap_of = [&](const V8Target& target, int64_t anchor) {
    const V8Anchor at = v8_anchor(heads, anchor);
    const float stride = heads.levels[at.level].stride;
    if (!v8_inside(target, v8_center(at.column, stride), v8_center(at.row, stride))) return T(-1);
    T d[4];
    for (int k = 0; k < 4; ++k) d[k] = p.side(image, at, k).distance;
    const T x = T(at.column) + T(0.5), y = T(at.row) + T(0.5), s = stride;
    return v8_overlap(target, CornerBox<T>{(x - d[0]) * s, (y - d[1]) * s, (x + d[2]) * s, (y + d[3]) * s});
  };
  const auto alignment_of = [&](const V8Target& target, int64_t anchor, T overlap) {
    return v8_alignment(p.class_logit(image, v8_anchor(heads, anchor), target.lookup), overlap, T(p.settings[kV8Alpha]),
                        T(p.settings[kV8Beta]));
  };
  std::map<int64_t, std::vector<size_t>> wanted;
  for (size_t t = 0; t < targets.size(); ++t) {
    std::set<uint64_t, std::greater<>> keys;
    for (int64_t a = 0; a < heads.anchors; ++a) {
      const T overlap = overlap_of(targets[t], a);
      if (overlap < 0) continue;
      if (const uint64_t key = v8_key(alignment_of(targets[t], a, overlap), a)) keys.insert(key);
    }
    int left = p.topk;
    std::set<int64_t> fits;
    for (const uint64_t key : keys) {
      fits.insert(v8_key_index(key));
      if (left-- > 0) wanted[v8_key_index(key)].push_back(t);
    }
    for (int64_t a = 0; a < heads.anchors && left > 0; ++a) {
      if (fits.count(a)) continue;
      --left;
      if (overlap_of(targets[t], a) >= 0) wanted[a].push_back(t);
    }
  }
  std::map<int64_t, Got<T>> got;
  for (const auto& [anchor, by] : wanted) {
    size_t winner = by.size() > 1 ? 0 : by.back();
    uint64_t best = 0;
    for (size_t t = 0; by.size() > 1 && t < targets.size(); ++t) {
      const T overlap = overlap_of(targets[t], anchor);
      const uint64_t key = overlap < 0 ? 0 : v8_key(overlap, static_cast<int64_t>(t));
      if (key > best) best = key, winner = t;
    }
    if (by.size() > 1 && best == 0) {  // it fits none of them: the first target of all gets it, without weight
      got[anchor] = {targets[winner], 0, 0, 0};
      continue;
    }
    const T overlap = overlap_of(targets[winner], anchor);
    got[anchor] = {targets[winner], alignment_of(targets[winner], anchor, overlap), overlap, 0};
  }
  for (const V8Target& target : targets) {
    std::vector<std::pair<uint64_t, int64_t>> mine;
    for (const auto& [anchor, one] : got) {
      if (one.target.row == target.row) mine.emplace_back(v8_key(one.alignment, anchor), anchor);
    }
    std::sort(mine.begin(), mine.end(), std::greater<>());
    T top_alignment = 0, top_overlap = 0;
    for (size_t i = 0; i < mine.size(); ++i) {
      const Got<T>& one = got[mine[i].second];
      const int64_t index = mine[i].second;
      const auto behind = [&](const auto& other) { return other.first != 0 && other.second > index; };
      const int64_t rank =
          mine[i].first != 0 ? static_cast<int64_t>(i) : index + std::count_if(mine.begin(), mine.end(), behind);
      if (p.topk2 != p.topk && rank >= p.topk2) {
        got.erase(mine[i].second);
        continue;
      }
      top_alignment = std::max(top_alignment, one.alignment);
      top_overlap = std::max(top_overlap, one.overlap);
    }
    for (auto& [anchor, one] : got) {
      if (one.target.row == target.row) {
        one.score = one.alignment * top_overlap / (top_alignment + T(p.settings[kV8Eps]));
      }
    }
  }
  return got;
}

// Backend has slot_blocks and class_blocks of the parameters, and forward(params, rows in use) and backward(params),
// which return whether they ran. With kFaults it counts bad rows rather than refusing them before.
template <class Backend, typename T>
void check(uint64_t seed, DType dtype) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  Problem<T> problem = make_problem<T>(random, dtype, Backend::kFaults);
  const V8Heads& heads = problem.heads;
  const int64_t anchors = heads.bs * heads.anchors, slots = problem.n * problem.topk;

  V8LossParams params{};
  params.heads = heads;
  params.targets = problem.targets.data();
  params.n = problem.n;
  params.num_targets = problem.claimed == problem.n && random.chance(50) ? nullptr : &problem.claimed;
  params.settings = problem.settings.data();
  params.class_weights = problem.weights.empty() ? nullptr : problem.weights.data();
  params.topk = problem.topk;
  params.topk2 = problem.topk2;
  std::vector<int64_t> slot_anchor(slots, 99), slot_row(slots, 99), first(heads.bs + 1, 99), status(kV8StatusSize, 99);
  std::vector<T> slot_score(slots, T(NAN)), scales(3, T(NAN)), loss(3), items(3);
  params.slots = {slot_anchor.data(), slot_row.data(), slot_score.data(), scales.data()};
  std::vector<CornerBox<T>> boxes(anchors);
  std::vector<uint32_t> owner(anchors, 99);
  std::vector<V8Target> targets(problem.n);
  std::vector<uint64_t> best(2 * problem.n, 99);
  std::vector<T> alignment(slots, T(NAN)), overlap(slots, T(NAN));
  std::vector<int32_t> winner(slots, 99);
  std::vector<T> slot_partials(4 * Backend::slot_blocks(params), T(NAN)),
      class_partials(Backend::class_blocks(params), T(NAN));
  params.scratch = {boxes.data(),     owner.data(),   targets.data(), first.data(),         best.data(),
                    alignment.data(), overlap.data(), winner.data(),  slot_partials.data(), class_partials.data()};
  params.loss = loss.data();
  params.items = items.data();
  params.status = status.data();
  ASSERT_TRUE(Backend::forward(params, problem.used));

  int64_t faults = 0, first_fault = 0;
  for (int64_t i = 0; i < problem.used; ++i) {
    const int fault = v8_target_fault(problem.targets.data() + 6 * i, heads.bs, heads.nc);
    if (fault && !faults++) first_fault = kV8FirstFault - (6 * i + fault - 1);
  }
  EXPECT_EQ(status[0], faults);
  EXPECT_EQ(status[1], first_fault);
  EXPECT_EQ(status[2], params.num_targets && problem.claimed != problem.used ? problem.claimed - problem.n : 0);

  std::map<int64_t, std::pair<int64_t, T>> found;  // anchor: row, score
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (slot_anchor[slot] < 0) continue;
    ASSERT_TRUE(found.emplace(slot_anchor[slot], std::make_pair(slot_row[slot], slot_score[slot])).second);
  }
  double scores = 0, box = 0, cls = 0, distance = 0;
  std::vector<std::map<int64_t, Got<T>>> got;
  for (int64_t b = 0; b < heads.bs; ++b) {
    got.push_back(assign_image(problem, b));
    for (const auto& [anchor, one] : got[b]) {
      const auto place = found.find(b * heads.anchors + anchor);
      ASSERT_NE(place, found.end()) << "image " << b << ", anchor " << anchor;
      ASSERT_EQ(place->second.first, one.target.row);
      ASSERT_NEAR(place->second.second, one.score, 1e-5 * std::abs(one.score) + 1e-30);
      found.erase(place);
      const V8Anchor at = v8_anchor(heads, anchor);
      const float stride = heads.levels[at.level].stride;
      const V8Pair<T> pair = v8_pair(one.target, at.column, at.row, T(stride));
      T d[4], by[4];
      for (int k = 0; k < 4; ++k) {
        const V8Side<T> side = problem.side(b, at, k);
        d[k] = side.distance;
        distance += one.score * v8_distance_term(side, v8_wanted_distance(pair, k),
                                                 T(stride) / T(k % 2 ? heads.image_h : heads.image_w), heads.reg_max,
                                                 [&](int i) { return problem.box_logit(b, at, k, i); });
      }
      box += one.score * (1 - v8_box_term(pair, d, by));
      cls -= one.score * problem.weight(one.target.label) * problem.class_logit(b, at, one.target.label);
      scores += one.score;
    }
    for (int64_t a = 0; a < heads.anchors; ++a) {
      for (int c = 0; c < heads.nc; ++c) {
        cls += problem.weight(c) * v8_softplus(problem.class_logit(b, v8_anchor(heads, a), c));
      }
    }
  }
  EXPECT_TRUE(found.empty());
  const double raw[3] = {box, cls, distance}, all = heads.bs * problem.settings[kV8Weight];
  for (int k = 0; k < 3; ++k) {
    const double item = raw[k] * problem.settings[k] / std::max(scores, 1.0);
    EXPECT_NEAR(items[k], item, 2e-5 * (1 + std::abs(item)));
    EXPECT_NEAR(loss[k], item * all, 2e-5 * (1 + std::abs(item * all)));
    EXPECT_NEAR(scales[k], all * problem.settings[k] / std::max(scores, 1.0), 2e-5 * all * problem.settings[k]);
  }

  V8LossBackwardParams back{};
  back.heads = heads;
  for (int t = 0; t < heads.num_tensors; ++t) back.heads.tensors[t].gradient = problem.gradients[t].data();
  back.targets = params.targets, back.n = params.n, back.class_weights = params.class_weights, back.topk = params.topk;
  back.slots = params.slots;
  const std::vector<T> grad = {T(1), T(7), T(2), T(7), T(3)};
  back.grad_loss = grad.data();
  back.grad_stride = 2;
  ASSERT_TRUE(Backend::backward(back));
  const bool half = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  const double tolerance = half ? 1e-2 : 1e-4, least = half ? 1e-4 : 1e-6;
  for (int64_t b = 0; b < heads.bs; ++b) {
    for (int64_t a = 0; a < heads.anchors; ++a) {
      const V8Anchor at = v8_anchor(heads, a);
      const V8Level& level = heads.levels[at.level];
      const auto one = got[b].find(a);
      const auto gradient = [&](int tensor, int64_t channel) {
        const V8Tensor& t = heads.tensors[tensor];
        return problem.gradients[tensor].get((b * t.channels + channel) * t.anchors + level.first_in_tensor + at.index);
      };
      for (int c = 0; c < heads.nc; ++c) {
        double want = sigmoid(problem.class_logit(b, at, c));
        if (one != got[b].end() && one->second.target.label == c) want -= one->second.score;
        want *= grad[2] * scales[1] * problem.weight(c);
        ASSERT_NEAR(gradient(level.classes, heads.tensors[level.classes].box_channels + c), want,
                    tolerance * std::abs(want) + least);
      }
      T d[4], by[4] = {};
      for (int k = 0; k < 4; ++k) d[k] = problem.side(b, at, k).distance;
      V8Pair<T> pair{};
      if (one != got[b].end()) {
        pair = v8_pair(one->second.target, at.column, at.row, T(level.stride));
        v8_box_term(pair, d, by);
      }
      for (int k = 0; k < 4; ++k) {
        for (int i = 0; i < heads.reg_max; ++i) {
          double want = 0;
          if (one != got[b].end()) {
            const T score = one->second.score;
            want = v8_side_gradient(
                problem.side(b, at, k), v8_wanted_distance(pair, k),
                T(level.stride) / T(k % 2 ? heads.image_h : heads.image_w), heads.reg_max,
                [&](int bin) { return problem.box_logit(b, at, k, bin); }, i, by[k] * (score * grad[0] * scales[0]),
                score * grad[4] * scales[2]);
          }
          ASSERT_NEAR(gradient(level.boxes, k * heads.reg_max + i), want, tolerance * std::abs(want) + least);
        }
      }
    }
  }
  for (const Tensor& tensor : problem.gradients) EXPECT_TRUE(tensor.surroundings_intact());
}

}  // namespace torch_fastdet::core::v8_problem
