// A loop over elements runs multi_tensor on random lists. The kernels and CPU loops are compared with it, bit by bit.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <optional>

#include "core/multi_tensor/multi_tensor_plan.h"
#include "core/multi_tensor/optimizer_math.h"
#include "memory.h"
#include "random.h"

namespace torch_fastdet::core::multi_tensor_problem {

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

struct TestRow {
  std::optional<Tensor> slot[kSlots];
  int32_t group;
  bool dense;  // all lie alike
  std::unique_ptr<float> step;

  int64_t numel() const {
    for (const auto& tensor : slot) {
      if (tensor) return tensor->numel();
    }
    return 0;
  }
  bool has_double() const {
    bool found = false;
    for (const auto& tensor : slot) found = found || (tensor && tensor->dtype == DType::kFloat64);
    return found;
  }
};

struct What {
  bool float32_only, with_params, with_grads, with_momentum, with_averages;
  int32_t groups;
  int rows;
  Rule rule = Rule::kSgd;
};

// Hold a list and its device-side form as csrc/ops/multi_tensor/cuda.cpp makes it.
struct TestList {
  std::vector<TestRow> rows;
  std::vector<Row> device_rows;
  std::vector<Layout> layouts;
  std::vector<Segment> segments;
  std::vector<double> partials = std::vector<double>(kMaxBlocks, std::nan(""));
  Workspace workspace{};
  MultiTensor view{};

  TestList(Random& random, const What& what) {
    for (int r = 0; r < what.rows; ++r) add_row(random, what);
    std::vector<int64_t> numels;
    for (const TestRow& row : rows) numels.push_back(row.numel());
    segments = plan_segments(numels);
    view = {device_rows.data(),
            segments.data(),
            layouts.data(),
            static_cast<int64_t>(rows.size()),
            static_cast<int64_t>(segments.size()),
            &workspace,
            partials.data(),
            what.float32_only,
            static_cast<int>(1 + random.below(3))};
  }

  void add_row(Random& random, const What& what) {
    static constexpr int64_t kSizes[] = {0,   1,   3,   7,   8,    9,    31,   32,   33,  64,
                                         127, 255, 256, 257, 1000, 1023, 1024, 1025, 2500};
    const bool average_only = what.with_averages && random.chance(15);
    const bool buffers = what.with_momentum && !average_only;
    const bool always = what.rule == Rule::kAdam || what.rule == Rule::kMuon;
    const bool wanted[kSlots] = {what.with_params, what.with_grads && !average_only && random.chance(90),
                                 buffers && (always || random.chance(90)),
                                 what.with_averages && (average_only || random.chance(80)),
                                 buffers && (always || (what.rule == Rule::kMovedSgd && random.chance(60)))};
    const bool mixed = !what.float32_only && random.chance(40);
    const bool strided = !what.float32_only && random.chance(30);
    const DType type = what.float32_only ? DType::kFloat32 : kTypes[random.below(4)];
    std::vector<int64_t> sizes = {kSizes[random.below(std::size(kSizes))]};
    if (strided) sizes = {1 + random.below(5), 1 + random.below(9), 1 + random.below(30)};
    TestRow row;
    row.group = average_only ? -1 : static_cast<int32_t>(random.below(what.groups));
    row.dense = !strided;
    const int64_t common_offset = random.chance(70) ? 0 : random.below(4);
    for (int s = 0; s < kSlots; ++s) {
      if (!wanted[s]) continue;
      const bool narrow = s == kSecond && what.rule == Rule::kMuon;
      const DType own = mixed ? kTypes[random.below(4)] : narrow ? DType::kBFloat16 : type;
      const int64_t offset = random.chance(85) ? common_offset : random.below(9);
      std::vector<int64_t> strides = Tensor::dense(sizes);
      if (strided && random.chance(60)) strides = {sizes[1] * sizes[2], 1, sizes[1]};          // permuted
      if (strided && random.chance(20)) strides = {sizes[1] * sizes[2] * 6, sizes[2] * 3, 2};  // with gaps
      Tensor& tensor = row.slot[s].emplace(own, sizes, strides, offset);
      for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, random.normal());
    }
    Row device{};
    const int64_t* strides[kSlots] = {};
    for (int s = 0; s < kSlots; ++s) {
      if (!row.slot[s]) continue;
      device.data[s] = row.slot[s]->data();
      device.dtype[s] = static_cast<uint8_t>(row.slot[s]->dtype);
      strides[s] = row.slot[s]->strides.data();
    }
    device.numel = row.numel();
    device.group = row.group;
    device.layout = -1;
    if (what.rule == Rule::kAdam && row.slot[kGrad]) {
      row.step = std::make_unique<float>(static_cast<float>(random.below(50)));
      device.step = row.step.get();
    }
    if (strided) {
      Layout layout;
      EXPECT_TRUE(merge_dims(layout, 3, sizes.data(), strides));
      device.layout = static_cast<int32_t>(layouts.size());
      layouts.push_back(layout);
    }
    rows.push_back(std::move(row));
    device_rows.push_back(device);
  }
};

// Values of every tensor are in logical order.
using Values = std::vector<std::vector<double>>;  // [row * kSlots + slot]

inline Values values_of(const TestList& list) {
  Values values;
  for (const TestRow& row : list.rows) {
    for (const auto& tensor : row.slot) values.push_back(tensor ? tensor->values() : std::vector<double>());
  }
  return values;
}

inline void expect_values(const TestList& list, const Values& want, uint64_t seed) {
  const Values got = values_of(list);
  for (size_t t = 0; t < want.size(); ++t) {
    ASSERT_EQ(got[t].size(), want[t].size());
    const auto& tensor = list.rows[t / kSlots].slot[t % kSlots];
    for (size_t i = 0; i < want[t].size(); ++i) {
      ASSERT_TRUE(identical(got[t][i], want[t][i]))
          << "seed " << seed << ", row " << t / kSlots << ", slot " << t % kSlots << ", dtype "
          << static_cast<int>(tensor->dtype) << ", element " << i << " of " << want[t].size() << ": " << got[t][i]
          << ", wanted " << want[t][i];
    }
    EXPECT_TRUE(!tensor || tensor->surroundings_intact()) << "seed " << seed << ", row " << t / kSlots;
  }
}

inline void expect_workspace_ready(const TestList& list) {
  EXPECT_EQ(list.workspace.ticket, 0u);
  EXPECT_EQ(list.workspace.nonfinite, 0u);
}

// Run a step on one element in the arithmetic type A of its row.
struct ElementStep {
  Rule rule;
  bool second, decoupled;
  double last, steps;
  bool scaled, clipped, update, momentum, unfilled, average;
  float inv_scale;
  double clip, decay;
  double lr, momentum_factor, dampening, weight_decay;
  bool nesterov, maximize;
  DType param_type, grad_type;
};

template <typename A>
void step_element(const ElementStep& s, double& param, double& grad, double& buffer, double& average, double& second) {
  A g = static_cast<A>(grad), p = static_cast<A>(param), b = static_cast<A>(buffer), v = static_cast<A>(second);
  if (s.scaled) g = static_cast<A>(rounded(s.grad_type, g * static_cast<A>(s.inv_scale)));
  if (s.clipped) g = static_cast<A>(rounded(s.grad_type, g * static_cast<A>(s.clip)));
  if (s.update) {
    const SgdScalars<A> sgd{static_cast<A>(s.lr),
                            static_cast<A>(s.momentum_factor),
                            static_cast<A>(1.0 - s.dampening),
                            static_cast<A>(s.weight_decay),
                            s.nesterov,
                            s.maximize};
    if (s.rule == Rule::kAdam) {
      const auto adam = adam_scalars<A>(s.lr, s.momentum_factor, s.dampening, s.weight_decay, s.last, s.decoupled,
                                        s.maximize, s.steps + 1);
      adam_element(p, g, b, v, adam);
    } else if (s.rule == Rule::kMuon) {
      v = muon_element(g, b, sgd.momentum, static_cast<A>(1.0 - s.momentum_factor), s.nesterov);
    } else {
      if (s.second) p = fused_mul_add(static_cast<A>(s.last), v, p);
      sgd_element(p, g, b, sgd, s.momentum, s.unfilled);
    }
    p = static_cast<A>(rounded(s.param_type, p));
  }
  if (s.average) {
    average = static_cast<A>(average) * static_cast<A>(s.decay) + p * static_cast<A>(1.0 - s.decay);
  }
  param = p;
  grad = g;
  buffer = b;
  second = v;
}

struct DeviceScalar {
  Scalar scalar;
  std::unique_ptr<double> memory;
  double value;

  DeviceScalar(Random& random, double wanted) : scalar{nullptr, wanted, DType::kFloat64}, value(wanted) {
    if (random.chance(50)) return;
    scalar.dtype = kTypes[random.below(4)];
    memory = std::make_unique<double>();
    store_as(scalar.dtype, memory.get(), wanted);
    value = load_as(scalar.dtype, memory.get());
    scalar.data = memory.get();
    scalar.value = -1e30;
  }
};

struct TestGroup {
  DeviceScalar lr, momentum, dampening, weight_decay, last;
  bool nesterov, maximize, decoupled;

  explicit TestGroup(Random& random)
      : lr(random, 0.1),
        momentum(random, 0.9),
        dampening(random, random.chance(50) ? 0.0 : 0.25),
        weight_decay(random, random.chance(50) ? 0.0 : 0.01),
        last(random, 0.001),
        nesterov(random.chance(50)),
        maximize(random.chance(30)),
        decoupled(random.chance(50)) {}
};

// Backend::reduce(list, params) and update(list, params, groups) run one step.
template <class Backend>
void reduce_and_update(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random(seed);
  Backend::seed(seed);
  What what{};
  what.float32_only = random.chance(30);
  what.with_grads = random.chance(90);
  what.with_averages = !what.with_grads || random.chance(50);
  what.with_params = what.with_averages || random.chance(80);
  what.with_momentum = what.with_grads && what.with_params && random.chance(70);
  if (what.with_momentum && random.chance(40)) what.rule = static_cast<Rule>(2 + random.below(3));
  what.groups = random.chance(20) ? kMaxGroups + 7 : 3;
  what.rows = random.chance(5) ? 0 : 1 + static_cast<int>(random.below(40));
  TestList list(random, what);
  const bool reduces = what.with_grads && random.chance(70);
  Values want = values_of(list);
  if (random.chance(30)) {  // somewhere, a gradient that is not finite
    for (size_t r = 0; r < list.rows.size(); ++r) {
      auto& grad = list.rows[r].slot[kGrad];
      if (!grad || !grad->numel() || random.chance(50)) continue;
      const int64_t at = random.below(grad->numel());
      grad->set(at, random.chance(50) ? std::nan("") : -std::numeric_limits<double>::infinity());
      want = values_of(list);
      break;
    }
  }

  const float scale = 65536.f / 3;
  float found_inf = random.chance(50) ? 7.f : 0.f, new_scale = 1024;
  int32_t tracker = 1;
  bool overflow = false;
  if (reduces) {
    const bool scaled = random.chance(60);
    const float found_before = found_inf;
    ReduceParams p{};
    p.list = list.view;
    p.scale = scaled ? &scale : nullptr;
    p.write_grads = random.chance(50);
    p.found_inf = random.chance(70) ? &found_inf : nullptr;
    p.keep_found_inf = random.chance(50);
    p.skip_on_overflow = random.chance(50);
    double norm = -1;
    p.norm_dtype = random.chance(50) ? DType::kFloat32 : DType::kFloat64;
    p.norm = random.chance(70) ? &norm : nullptr;
    p.clip = random.chance(70);
    p.max_norm = 0.5;
    p.new_scale = random.chance(50) ? &new_scale : nullptr;
    p.growth_tracker = &tracker;
    p.growth_factor = 2, p.backoff_factor = 0.5, p.growth_interval = 2;
    const float inv_scale = scaled ? inverse_scale(scale) : 1.f;
    double sum = 0;
    for (size_t r = 0; r < list.rows.size(); ++r) {
      const auto& tensor = list.rows[r].slot[kGrad];
      for (double& grad : want[r * kSlots + kGrad]) {
        overflow = overflow || !std::isfinite(grad);
        const double multiplied = !scaled ? grad
                                          : rounded(tensor->dtype, tensor->dtype == DType::kFloat64
                                                                       ? grad * inv_scale
                                                                       : double{static_cast<float>(grad) * inv_scale});
        sum += multiplied * multiplied;
        if (p.write_grads) grad = multiplied;
      }
    }
    ASSERT_TRUE(Backend::reduce(list, p));
    expect_workspace_ready(list);
    expect_values(list, want, seed);
    const double got_norm = !p.norm ? -1 : p.norm_dtype == DType::kFloat64 ? norm : load_as(DType::kFloat32, &norm);
    if (p.norm && !overflow) {
      EXPECT_NEAR(got_norm, std::sqrt(sum), 1e-5 * std::sqrt(sum));
    }
    if (p.norm && overflow) {
      EXPECT_FALSE(std::isfinite(got_norm));
    }
    if (p.found_inf) {
      EXPECT_EQ(found_inf, overflow ? 1.f : p.keep_found_inf ? found_before : 0.f);
    }
    if (p.new_scale) {
      EXPECT_EQ(new_scale, overflow ? 512.f : 2048.f);
      EXPECT_EQ(tracker, 0);
    }
    EXPECT_EQ(list.workspace.skip != 0, overflow && p.skip_on_overflow);
    EXPECT_EQ(list.workspace.inv_scale, inv_scale);
    if (!p.clip) {
      EXPECT_EQ(list.workspace.clip, 1.0);
    } else if (!overflow) {
      EXPECT_NEAR(list.workspace.clip, std::min(1.0, 0.5 / (std::sqrt(sum) + 1e-6)), 1e-5);
    }
    // Written gradients must not be multiplied a second time.
    if (p.write_grads) list.workspace.inv_scale = 1;
  }

  UpdateParams p{};
  p.list = list.view;
  p.use_workspace = reduces;
  p.grad_scale = what.with_grads && random.chance(30) ? &scale : nullptr;
  found_inf = random.chance(85) ? 0.f : 1.f;
  p.found_inf = random.chance(50) ? &found_inf : nullptr;
  p.write_grads = what.with_grads && random.chance(50);
  const bool steps = what.with_grads && what.with_params && random.chance(90);
  p.rule = steps ? what.rule : Rule::kNone;
  p.first_step = random.chance(20);
  std::vector<uint8_t> unfilled(list.rows.size());
  for (uint8_t& flag : unfilled) flag = random.chance(50);
  p.unfilled = steps && random.chance(50) ? unfilled.data() : nullptr;
  p.ema = what.with_averages && random.chance(90);
  const DeviceScalar decay(random, 0.99);
  p.decay = decay.scalar;
  p.tau = random.chance(50) ? 2000 : 0;
  int64_t counter = 41;
  p.counter = &counter;
  p.updates = random.chance(50) ? -1 : 12;
  const bool write_counter = p.ema && random.chance(70);
  std::vector<TestGroup> groups;
  for (int g = 0; steps && g < what.groups; ++g) groups.emplace_back(random);

  const bool skip = (p.use_workspace && list.workspace.skip) || (p.found_inf && found_inf != 0);
  const float inv_scale = p.grad_scale ? inverse_scale(scale) : p.use_workspace ? list.workspace.inv_scale : 1.f;
  const double clip = p.use_workspace ? list.workspace.clip : 1.0;
  const int64_t updates = p.updates >= 0 ? p.updates : 42;
  std::vector<uint8_t> want_unfilled = unfilled;
  std::vector<float> want_steps;
  for (size_t r = 0; r < list.rows.size(); ++r) {
    const TestRow& row = list.rows[r];
    const bool has_grad = row.slot[kGrad] && !skip;
    ElementStep s{};
    s.update = steps && has_grad && row.group >= 0;
    const bool writes_grad = p.write_grads && has_grad && (!steps || s.update);
    s.scaled = inv_scale != 1.f && (s.update || writes_grad);
    s.clipped = clip != 1.0 && (s.update || writes_grad);
    s.inv_scale = inv_scale;
    s.clip = clip;
    s.average = p.ema && row.slot[kAverage];
    s.decay = p.tau > 0 ? ema_decay(decay.value, p.tau, static_cast<double>(updates)) : decay.value;
    s.momentum = row.slot[kMomentum].has_value();
    s.rule = what.rule;
    s.second = row.slot[kSecond].has_value();
    if (row.step) s.steps = *row.step;
    s.unfilled = p.first_step || (p.unfilled && unfilled[r]);
    if (row.slot[kParam]) s.param_type = row.slot[kParam]->dtype;
    if (row.slot[kGrad]) s.grad_type = row.slot[kGrad]->dtype;
    if (s.update) {
      const TestGroup& group = groups[row.group];
      s.lr = group.lr.value, s.momentum_factor = group.momentum.value, s.dampening = group.dampening.value;
      s.weight_decay = group.weight_decay.value, s.nesterov = group.nesterov, s.maximize = group.maximize;
      s.last = group.last.value, s.decoupled = group.decoupled;
    }
    for (int64_t i = 0; i < row.numel(); ++i) {
      double v[kSlots] = {};
      for (int slot = 0; slot < kSlots; ++slot) {
        if (row.slot[slot]) v[slot] = want[r * kSlots + slot][i];
      }
      row.has_double() ? step_element<double>(s, v[kParam], v[kGrad], v[kMomentum], v[kAverage], v[kSecond])
                       : step_element<float>(s, v[kParam], v[kGrad], v[kMomentum], v[kAverage], v[kSecond]);
      const bool written[kSlots] = {s.update && s.rule != Rule::kMuon, writes_grad, s.update && s.momentum, s.average,
                                    s.update && s.second && s.rule != Rule::kMovedSgd};
      for (int slot = 0; slot < kSlots; ++slot) {
        if (written[slot]) want[r * kSlots + slot][i] = rounded(row.slot[slot]->dtype, v[slot]);
      }
    }
    if (p.unfilled && !skip && row.slot[kGrad] && row.slot[kMomentum] && row.group >= 0) want_unfilled[r] = 0;
    want_steps.push_back(row.step ? *row.step + (steps && what.rule == Rule::kAdam && !skip) : 0);
  }

  std::vector<Group> given;
  for (const TestGroup& g : groups) {
    given.push_back({g.lr.scalar, g.momentum.scalar, g.dampening.scalar, g.weight_decay.scalar, g.last.scalar,
                     g.nesterov, g.maximize, g.decoupled});
  }
  p.write_counter = write_counter;
  ASSERT_TRUE(Backend::update(list, p, given));
  expect_workspace_ready(list);
  expect_values(list, want, seed);
  EXPECT_EQ(unfilled, want_unfilled);
  for (size_t r = 0; r < list.rows.size(); ++r) {
    if (list.rows[r].step) {
      EXPECT_EQ(*list.rows[r].step, want_steps[r]);
    }
  }
  EXPECT_EQ(counter, write_counter ? updates : 41);
}

// There are more segments than the grid has warps, and tensors span blocks: the order of sums is still fixed.
template <class Backend>
void check_order_of_sums() {
  for (const bool float32_only : {true, false}) {
    Random random(5);
    TestList list(random, What{float32_only, false, true, false, false, 1, 300});
    ReduceParams p{};
    p.list = list.view;
    double norm[5] = {};
    p.norm_dtype = DType::kFloat64;
    for (int run = 0; run < 5; ++run) {
      Backend::seed(run);
      p.norm = &norm[run];
      ASSERT_TRUE(Backend::reduce(list, p));
      EXPECT_EQ(norm[run], norm[0]);
    }
    EXPECT_GT(norm[0], 100);
  }
}

}  // namespace torch_fastdet::core::multi_tensor_problem
