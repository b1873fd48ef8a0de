// torch.classes.torch_fastdet.MultiTensorState holds the tensors of an optimizer and a moving average on one device, so
// that it walks the parameters and checks whether any has moved in microseconds.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "ops/multi_tensor/checks.h"
#include "ops/multi_tensor/list.h"

namespace torch_fastdet::multi_tensor {
namespace {

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

constexpr int64_t kNesterov = 1, kMaximize = 2, kHasMomentum = 4, kDecoupled = 8;
constexpr size_t kNumbers = 5;  // fields of core::Group, for each group

// Python passes this tuple: each group's numbers of core::Group, the tensors (or none) that replace them, and flags.
struct Hyper {
  using Types = std::tuple<std::vector<double>, OptionalTensors, std::vector<int64_t>>;
  const std::vector<double>& numbers;
  const OptionalTensors& tensors;
  const std::vector<int64_t>& flags;
  Hyper(const Types& from) : numbers(std::get<0>(from)), tensors(std::get<1>(from)), flags(std::get<2>(from)) {}
  double dampening(int64_t group) const { return numbers[kNumbers * group + 2]; }
};

// Hold the reduction's arguments: GradScaler's scale, growth tracker and numbers, the norm's limit, norm, found_inf.
struct Reduction {
  using Types = std::tuple<std::optional<at::Tensor>, std::optional<at::Tensor>, std::vector<double>,
                           std::optional<double>, at::Tensor, at::Tensor>;
  const std::optional<at::Tensor>&scale, &growth_tracker;
  const std::vector<double>& growth;
  const std::optional<double> max_norm;
  const at::Tensor &norm, &found_inf;
  Reduction(const Types& from)
      : scale(std::get<0>(from)),
        growth_tracker(std::get<1>(from)),
        growth(std::get<2>(from)),
        max_norm(std::get<3>(from)),
        norm(std::get<4>(from)),
        found_inf(std::get<5>(from)) {}
  bool needed() const { return scale || max_norm; }
};

// Hold the moving average's settings. Decay < 0: none; tau > 0: a ramp over `updates` or, if -1, over `counter`.
struct Averaging {
  using Types = std::tuple<double, double, int64_t, std::optional<at::Tensor>>;
  const double decay, tau;
  const int64_t updates;
  const std::optional<at::Tensor>& counter;
  Averaging(const Types& from)
      : decay(std::get<0>(from)), tau(std::get<1>(from)), updates(std::get<2>(from)), counter(std::get<3>(from)) {}
};

class State : public torch::CustomClassHolder {
 public:
  // params[i] belongs to group groups[i], errors (which begin with `name`) call it places[i], and averages[i] is its
  // average if given. values only have value_averages.
  State(std::string name, std::vector<at::Tensor> params, std::vector<int64_t> groups, std::vector<int64_t> places,
        OptionalTensors averages, std::vector<at::Tensor> values, std::vector<at::Tensor> value_averages)
      : name_(std::move(name)),
        params_(std::move(params)),
        groups_(std::move(groups)),
        places_(std::move(places)),
        momentum_(params_.size()),
        second_(params_.size()),
        steps_(params_.size()),
        unfilled_(params_.size(), false),
        values_(std::move(values)),
        value_averages_(std::move(value_averages)) {
    TORCH_CHECK(groups_.size() == params_.size() && places_.size() == params_.size(), name_, ": groups has ",
                groups_.size(), " and places ", places_.size(), " entries, but params has ", params_.size());
    check_length(name_.c_str(), "value_averages", value_averages_.size(), "values", values_.size());
    averages_.resize(params_.size());
    TORCH_CHECK(averages.empty() || averages.size() == params_.size(), name_, ": averages has ", averages.size(),
                " entries, but params has ", params_.size());
    for (size_t i = 0; i < averages.size(); ++i) averages_[i] = averages[i].value_or(at::Tensor());
    int64_t count = 0;
    for (const int64_t group : groups_) count = std::max(count, group + 1);
    has_momentum_.resize(count, false);
  }

  OptionalTensors momentum_buffers() const {
    OptionalTensors result;
    for (const at::Tensor& buffer : momentum_) {
      result.push_back(buffer.defined() ? std::optional<at::Tensor>(buffer) : std::nullopt);
    }
    return result;
  }

  void set_momentum_buffers(const OptionalTensors& buffers) {
    TORCH_CHECK(buffers.size() == params_.size(), name_, ": momentum_buffers has ", buffers.size(),
                " entries, but params has ", params_.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
      at::Tensor buffer = buffers[i].value_or(at::Tensor());
      if (unfilled_[i] && !buffer.is_same(momentum_[i])) {
        unfilled_[i] = false;
        unfilled_bytes_.select(0, static_cast<int64_t>(i)).zero_();
      }
      momentum_[i] = std::move(buffer);
    }
  }

  // Use another core::Rule from now on, with these tensors in kMomentum, kSecond and Adam's steps.
  void set_buffers(int64_t rule, const OptionalTensors& first, const OptionalTensors& second,
                   const OptionalTensors& steps) {
    rule_ = static_cast<core::Rule>(rule);
    for (const OptionalTensors* list : {&first, &second, &steps}) {
      TORCH_CHECK(list->size() == params_.size() || (list == &steps && list->empty()), name_,
                  ": a list of buffers has ", list->size(), " entries, but params has ", params_.size());
    }
    for (size_t i = 0; i < params_.size(); ++i) {
      momentum_[i] = first[i].value_or(at::Tensor());
      second_[i] = second[i].value_or(at::Tensor());
      steps_[i] = steps.empty() ? at::Tensor() : steps[i].value_or(at::Tensor());
      if (!steps_[i].defined()) continue;
      check_float32_scalar(steps_[i], params_[i].device(), name_.c_str(), "step");
    }
  }

  // Return the memory where reduce() leaves scale, clip and overflow, for this object and others that are given it.
  at::Tensor workspace() {
    if (!workspace_.defined()) {
      const c10::InferenceMode writable(false);
      const auto options = at::TensorOptions().device(params_.at(0).device()).dtype(at::kByte);
      set_workspace(at::zeros({static_cast<int64_t>(sizeof(core::Workspace))}, options));
    }
    return workspace_;
  }

  void set_workspace(const at::Tensor& workspace) {
    workspace_ = workspace;
    listed_ = false;
  }

  // Return flags of the gradients: 1 if there is one, 2 if one is float16, 4 if one is sparse.
  int64_t gradients() const {
    int64_t found = 0;
    for (const at::Tensor& param : params_) {
      const at::Tensor& grad = param.grad();
      if (!grad.defined()) continue;
      found |= 1 | (grad.scalar_type() == at::kHalf ? 2 : 0) | (grad.layout() != at::kStrided ? 4 : 0);
    }
    return found;
  }

  // Multiply the gradients by 1 / scale, in place, and return found_inf.
  at::Tensor unscale(const at::Tensor& scale) {
    const List& list = rows(true);
    core::ReduceParams params = reduction();
    const at::Tensor found_inf = flag(list);
    params.scale = float_pointer(scale, list, name_.c_str(), "scale");
    params.found_inf = static_cast<float*>(found_inf.mutable_data_ptr());
    params.write_grads = true;
    run(list, &params, nullptr, {});
    bump_grads();
    return found_inf;
  }

  // Apply clip_grad_norm_ to all gradients and return the norm.
  at::Tensor clip_grad_norm(double max_norm) {
    const List& list = rows(true);
    core::ReduceParams reduce = reduction();
    const at::Tensor norm = empty_norm(list, reduce);
    reduce.clip = true;
    reduce.max_norm = max_norm;
    core::UpdateParams scale = update();
    scale.use_workspace = true;
    scale.write_grads = true;
    run(list, &reduce, &scale, {});
    bump_grads();
    return as_torch_returns(norm, list);
  }

  // Raise what step() would raise, without writing. With several devices, check all of them before a step.
  void check_step(const Hyper::Types& hyper, bool unscales) {
    missing_buffers(hyper);
    make_groups(rows(unscales), hyper);
  }

  // Take one step. `use_workspace` applies reduce()'s scale, clip and skip. Return the number of new momentum buffers.
  int64_t step(const Hyper::Types& hyper, const std::optional<at::Tensor>& grad_scale,
               const std::optional<at::Tensor>& found_inf, bool use_workspace) {
    const bool write_grads = grad_scale.has_value() && rule_ != core::Rule::kMuon;
    const std::vector<size_t> missing = missing_buffers(hyper);
    const List& list = rows(write_grads);
    core::UpdateParams params = update();
    const auto groups = make_groups(list, hyper);
    params.rule = rule_;
    params.use_workspace = use_workspace;
    params.grad_scale = float_pointer(grad_scale, list, name_.c_str(), "grad_scale");
    params.found_inf = float_pointer(found_inf, list, name_.c_str(), "found_inf");
    params.write_grads = write_grads;
    with_buffers(missing, hyper, [&] {
      if (!missing.empty()) rows(write_grads);
      params.unfilled = unfilled_pointer();
      run(list, nullptr, &params, groups);
    });
    after_step(found_inf.has_value() || use_workspace);
    if (write_grads) bump_grads();
    return static_cast<int64_t>(missing.size());
  }

  void ema(double decay) {
    const List& list = rows(false);
    core::UpdateParams params = update();
    params.ema = true;
    params.decay = scalar(decay);
    run(list, nullptr, &params, {});
    bump_averages();
  }

  // Run the first half of fused(), for steps that do more in between and read the result in workspace().
  void reduce(const Hyper::Types& hyper, const Reduction::Types& reduction) {
    workspace();
    check_step(hyper, false);  // must precede the change of the scale
    const List& list = rows(false);
    const core::ReduceParams params = reduce_params(list, reduction);
    unfilled_pointer();
    if (Reduction(reduction).needed()) run(list, &params, nullptr, {});
  }

  // Unscale, clip, take the optimizer's step and update the moving average in two launches, or in one if neither a
  // scale nor a norm is needed or if reduce() has run (`reduced`). Gradients do not change.
  int64_t fused(const Hyper::Types& hyper, const Reduction::Types& reduction, const Averaging::Types& averaging,
                bool reduced) {
    const Reduction wanted(reduction);
    const std::vector<size_t> missing = missing_buffers(hyper);
    const List& list = rows(false);
    const auto groups = make_groups(list, hyper);
    const core::ReduceParams reduce = reduce_params(list, wanted);
    core::UpdateParams params = update();
    params.use_workspace = wanted.needed();
    params.rule = rule_;
    set_average(params, list, averaging);
    with_buffers(missing, hyper, [&] {
      if (!missing.empty()) rows(false);
      params.unfilled = unfilled_pointer();
      run(list, wanted.needed() && !reduced ? &reduce : nullptr, &params, groups);
    });
    after_step(wanted.scale.has_value());
    if (params.ema) bump_averages();
    return static_cast<int64_t>(missing.size());
  }

 private:
  // Hold the address and layout on which a row depends. Contiguous tensors of one size are alike, whatever their shape.
  struct Stamp {
    const void* data = nullptr;
    uint64_t layout = 0;
    bool operator!=(const Stamp& other) const { return data != other.data || layout != other.layout; }
  };

  static Stamp stamp(const at::Tensor* tensor) {
    if (!tensor || !tensor->defined()) return {};
    if (C10_UNLIKELY(tensor->layout() != at::kStrided)) return {tensor->unsafeGetTensorImpl(), 1};
    uint64_t layout = static_cast<uint64_t>(tensor->scalar_type()) * 2 + 3;
    if (C10_LIKELY(tensor->is_contiguous())) {
      layout += static_cast<uint64_t>(tensor->numel()) << 8;
    } else {
      for (const int64_t size : tensor->sizes())
        layout = (layout ^ static_cast<uint64_t>(size)) * 0x9e3779b97f4a7c15ull;
      for (const int64_t stride : tensor->strides()) {
        layout = (layout ^ static_cast<uint64_t>(stride)) * 0x9e3779b97f4a7c15ull;
      }
      layout |= 1;
    }
    return {tensor->const_data_ptr(), layout};
  }

  // Call f(row, tensors, group) for each row. Without a gradient it has only its average, without both any type.
  template <typename F>
  void for_rows(const F& f) const {
    for (size_t i = 0; i < params_.size(); ++i) {
      const at::Tensor& grad = params_[i].grad();
      const bool steps = grad.defined();
      const at::Tensor* param = steps || averages_[i].defined() ? &params_[i] : nullptr;
      if (rule_ == core::Rule::kMuon) param = nullptr;
      const at::Tensor* momentum =
          steps && (rule_ != core::Rule::kSgd || has_momentum_[groups_[i]]) ? &momentum_[i] : nullptr;
      const at::Tensor* second = steps && rule_ != core::Rule::kSgd ? &second_[i] : nullptr;
      const at::Tensor* tensors[core::kSlots] = {param, &grad, momentum, &averages_[i], second};
      f(i, tensors, static_cast<int32_t>(groups_[i]));
    }
    for (size_t i = 0; i < values_.size(); ++i) {
      const at::Tensor* tensors[core::kSlots] = {&values_[i], nullptr, nullptr, &value_averages_[i], nullptr};
      f(params_.size() + i, tensors, -1);
    }
  }

  // Return all rows. A step's calls share a work list, which is rebuilt if a tensor's address, layout or dtype changes.
  const List& rows(bool grads_written) {
    bool same = listed_ && (list_grads_written_ || !grads_written);
    if (same) {
      size_t at = 0;
      for_rows([&](size_t row, const at::Tensor* const tensors[], int32_t) {
        for (int slot = 0; slot < core::kSlots; ++slot) same = same && !(stamp(tensors[slot]) != stamps_[at++]);
        same = same && step_of(row, tensors) == steps_listed_[row];
      });
    }
    if (same) return list_;
    listed_ = false;
    list_ = List();
    list_.narrow_second = rule_ == core::Rule::kMuon;
    if (workspace_.defined()) list_.workspace = static_cast<core::Workspace*>(workspace_.mutable_data_ptr());
    if (!params_.empty() || !values_.empty()) list_.device = (params_.empty() ? values_ : params_)[0].device();
    list_.rows.reserve(params_.size() + values_.size());
    for_rows([&](size_t row, const at::Tensor* const tensors[], int32_t group) {
      const bool is_param = group >= 0;
      const bool steps = is_param && tensors[core::kGrad]->defined();
      const bool written[core::kSlots] = {steps, grads_written, true, true, rule_ != core::Rule::kMovedSgd};
      list_.add(name_.c_str(), tensors, written, group, [&](int slot) {
        static const char* const names[core::kSlots] = {"params", "grads", "momentum_buffers", "averages",
                                                        "second buffers"};
        static const char* const value_names[core::kSlots] = {"values", "", "", "averages", ""};
        return is_param ? indexed(names[slot], places_[row]) : indexed(value_names[slot], row - params_.size());
      });
      list_.rows.back().step = step_of(row, tensors);
    });
    // Take stamps after making the rows, because a lazy copy gets its own memory meanwhile.
    stamps_.clear();
    steps_listed_.clear();
    for_rows([&](size_t row, const at::Tensor* const tensors[], int32_t) {
      steps_listed_.push_back(step_of(row, tensors));
      for (int slot = 0; slot < core::kSlots; ++slot) stamps_.push_back(stamp(tensors[slot]));
    });
    list_grads_written_ = grads_written;
    listed_ = true;
    return list_;
  }

  // Return where Adam counts the steps of a row, or null if the row takes none.
  float* step_of(size_t row, const at::Tensor* const tensors[]) const {
    if (row >= params_.size() || !steps_[row].defined() || !tensors[core::kGrad]->defined()) return nullptr;
    return static_cast<float*>(steps_[row].mutable_data_ptr());
  }

  at::Tensor flag(const List& list) const {
    return at::empty({}, at::TensorOptions().device(list.device).dtype(at::kFloat));
  }

  bool any_unfilled() const { return std::find(unfilled_.begin(), unfilled_.end(), true) != unfilled_.end(); }

  uint8_t* unfilled_pointer() {
    const bool any = any_unfilled();
    // A captured graph still reads these after this object is gone.
    list_.owned_by_graph.clear();
    if (any) list_.owned_by_graph.push_back(unfilled_bytes_);
    if (workspace_.defined()) list_.owned_by_graph.push_back(workspace_);
    return any ? static_cast<uint8_t*>(unfilled_bytes_.mutable_data_ptr()) : nullptr;
  }

  core::ReduceParams reduce_params(const List& list, const Reduction& wanted) const {
    const char* op = name_.c_str();
    core::ReduceParams params = reduction();
    if (!wanted.needed()) return params;
    params.scale = float_pointer(wanted.scale, list, op, "scale");
    params.found_inf = float_pointer(wanted.found_inf, list, op, "found_inf");
    params.skip_on_overflow = wanted.scale.has_value();
    check_scalar_tensor(wanted.norm, list.device, op, "norm");
    params.norm = wanted.norm.mutable_data_ptr();
    params.norm_dtype = core_dtype(wanted.norm.scalar_type());
    params.clip = wanted.max_norm.has_value();
    params.max_norm = wanted.max_norm.value_or(0.0);
    if (!wanted.scale) return params;
    const std::optional<at::Tensor>& tracker = wanted.growth_tracker;
    TORCH_CHECK(
        tracker && tracker->scalar_type() == at::kInt && tracker->numel() == 1 && tracker->device() == list.device, op,
        ": growth_tracker of the scaler is not one int32 on ", list.device, ", as scale is");
    TORCH_CHECK(wanted.growth.size() == 3, op, ": growth has ", wanted.growth.size(),
                " numbers, but three are expected");
    params.new_scale = params.scale ? const_cast<float*>(params.scale) : nullptr;
    params.growth_tracker = static_cast<int32_t*>(tracker->mutable_data_ptr());
    params.growth_factor = wanted.growth[0];
    params.backoff_factor = wanted.growth[1];
    constexpr double kLongest = std::numeric_limits<int32_t>::max();
    params.growth_interval = static_cast<int32_t>(std::min(wanted.growth[2], kLongest));
    return params;
  }

  void set_average(core::UpdateParams& params, const List& list, const Averaging& wanted) const {
    const char* op = name_.c_str();
    params.ema = wanted.decay >= 0;
    params.decay = scalar(wanted.decay);
    params.tau = wanted.tau;
    params.updates = wanted.updates;
    if (wanted.counter) {
      const at::Tensor& counter = *wanted.counter;
      TORCH_CHECK(counter.scalar_type() == at::kLong && counter.numel() == 1 && counter.device() == list.device, op,
                  ": counter is ", dtype_name(counter.scalar_type()), " on ", counter.device(), ", but one int64 on ",
                  list.device, " is expected");
      params.counter = static_cast<int64_t*>(counter.mutable_data_ptr());
      params.write_counter = params.ema;
    }
    TORCH_CHECK(!params.ema || wanted.updates >= 0 || wanted.counter, op, ": updates is -1, but no counter is given");
  }

  // Return the parameters that have a gradient for the first time and need a momentum buffer.
  std::vector<size_t> missing_buffers(const Hyper& hyper) {
    const std::vector<int64_t>& flags = hyper.flags;
    TORCH_CHECK(flags.size() >= has_momentum_.size() && hyper.numbers.size() == kNumbers * flags.size(), name_,
                ": flags has ", flags.size(), " and hyper ", hyper.numbers.size(), " entries, but ",
                has_momentum_.size(), " groups are here");
    has_momentum_.resize(flags.size());  // the last groups may have no parameters here
    for (size_t group = 0; group < flags.size(); ++group) has_momentum_[group] = flags[group] & kHasMomentum;
    std::vector<size_t> missing;
    for (size_t i = 0; i < params_.size() && rule_ != core::Rule::kSgd; ++i) {
      TORCH_CHECK(momentum_[i].defined() || !params_[i].grad().defined(), name_, ": params[", places_[i],
                  "] has a gradient, but no buffers were given for it");
    }
    for (size_t i = 0; i < params_.size() && rule_ == core::Rule::kSgd; ++i) {
      if (has_momentum_[groups_[i]] && !momentum_[i].defined() && params_[i].grad().defined()) missing.push_back(i);
    }
    TORCH_CHECK(missing.empty() || !is_capturing(), name_, ": params[", places_[missing[0]],
                "] has no momentum buffer yet, and a buffer made inside of a CUDA graph capture would not outlive a "
                "replay; take one step before the capture");
    return missing;
  }

  // Run `step` with the missing buffers made, and remove them if it throws. They start at zero and stay so if the first
  // step is skipped. If dampening makes the first step special, a byte on the device marks it.
  template <typename F>
  void with_buffers(const std::vector<size_t>& missing, const Hyper& hyper, const F& step) {
    try {
      // These are made once and written in every step; training could not write tensors made in torch.inference_mode.
      const c10::InferenceMode writable(false);
      const at::NoGradGuard no_grad;
      for (const size_t i : missing) {
        momentum_[i] = at::zeros_like(params_[i].detach());
        if (hyper.dampening(groups_[i]) == 0.0) continue;
        if (!unfilled_bytes_.defined()) {
          const auto options = at::TensorOptions().device(params_[0].device()).dtype(at::kByte);
          unfilled_bytes_ = at::zeros({static_cast<int64_t>(params_.size() + values_.size())}, options);
        }
        unfilled_bytes_.select(0, static_cast<int64_t>(i)).fill_(1);
        unfilled_[i] = true;
      }
      step();
    } catch (...) {
      for (const size_t i : missing) {
        momentum_[i] = at::Tensor();
        if (unfilled_[i]) unfilled_bytes_.select(0, static_cast<int64_t>(i)).zero_();
        unfilled_[i] = false;
      }
      throw;
    }
  }

  bool is_capturing() const {
    List list;
    list.device = params_[0].device();
    return multi_tensor::is_capturing(list);
  }

  void after_step(bool may_skip) {
    // Without a scaler the host knows that the step was taken and that the device has cleared these bytes.
    const bool taken = !may_skip && any_unfilled() && !is_capturing();
    for (size_t i = 0; i < params_.size(); ++i) {
      if (!params_[i].grad().defined()) continue;
      if (taken && has_momentum_[groups_[i]]) unfilled_[i] = false;
      if (rule_ != core::Rule::kMuon) bump_version(params_[i]);
      bump_version(momentum_[i]);
      if (rule_ == core::Rule::kAdam) bump_version(second_[i]);
    }
  }

  void bump_grads() {
    for (const at::Tensor& param : params_) bump_version(param.grad());
  }

  void bump_averages() {
    for (const at::Tensor& average : averages_) bump_version(average);
    for (const at::Tensor& average : value_averages_) bump_version(average);
  }

  std::string in_group(size_t group) const { return name_ + ": " + indexed("param_groups", group); }

  std::vector<core::Group> make_groups(const List& list, const Hyper& hyper) const {
    const auto& [numbers, tensors, flags] = hyper;
    const char* op = name_.c_str();
    static const char* const sgd_names[kNumbers] = {"lr", "momentum", "dampening", "weight_decay", "muon"};
    static const char* const adam_names[kNumbers] = {"lr", "betas[0]", "betas[1]", "weight_decay", "eps"};
    const bool adam = rule_ == core::Rule::kAdam;
    const auto& names = adam ? adam_names : sgd_names;
    TORCH_CHECK(tensors.empty() || tensors.size() == numbers.size(), op, ": hyper_tensors has ", tensors.size(),
                " entries, but hyper has ", numbers.size());
    std::vector<core::Group> groups;
    for (size_t group = 0; group < flags.size(); ++group) {
      core::Scalar scalars[kNumbers];
      for (size_t k = 0; k < kNumbers; ++k) {
        const size_t at = kNumbers * group + k;
        if (!tensors.empty() && tensors[at]) {
          scalars[k] = scalar(*tensors[at], list, in_group(group).c_str(), names[k]);
        } else {
          const bool any_sign = !adam && (k == 2 || k == 4);
          if (!any_sign && !(numbers[at] >= 0.0)) check_hyper_parameter(in_group(group).c_str(), names[k], numbers[at]);
          scalars[k] = scalar(numbers[at]);
        }
      }
      groups.push_back({scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], (flags[group] & kNesterov) != 0,
                        (flags[group] & kMaximize) != 0, (flags[group] & kDecoupled) != 0});
    }
    return groups;
  }

  std::string name_;
  std::vector<at::Tensor> params_;
  std::vector<int64_t> groups_;
  std::vector<int64_t> places_;
  core::Rule rule_ = core::Rule::kSgd;
  std::vector<at::Tensor> momentum_;
  std::vector<at::Tensor> second_;
  std::vector<at::Tensor> steps_;
  at::Tensor workspace_;
  std::vector<bool> unfilled_;  // true if a byte of unfilled_bytes_ may be 1
  std::vector<at::Tensor> averages_;
  std::vector<at::Tensor> values_;
  std::vector<at::Tensor> value_averages_;
  std::vector<bool> has_momentum_;
  List list_;
  std::vector<Stamp> stamps_;
  std::vector<const float*> steps_listed_;
  bool listed_ = false;
  bool list_grads_written_ = false;
  at::Tensor unfilled_bytes_;  // made once and kept, because a captured graph may point to it
};

TORCH_LIBRARY_FRAGMENT(torch_fastdet, m) {
  m.class_<State>("MultiTensorState")
      .def(torch::init<std::string, std::vector<at::Tensor>, std::vector<int64_t>, std::vector<int64_t>,
                       OptionalTensors, std::vector<at::Tensor>, std::vector<at::Tensor>>())
      .def("momentum_buffers", &State::momentum_buffers)
      .def("set_momentum_buffers", &State::set_momentum_buffers)
      .def("gradients", &State::gradients)
      .def("unscale_", &State::unscale)
      .def("clip_grad_norm_", &State::clip_grad_norm)
      .def("set_buffers", &State::set_buffers)
      .def("workspace", &State::workspace)
      .def("set_workspace", &State::set_workspace)
      .def("check_step", &State::check_step)
      .def("step_", &State::step)
      .def("ema_", &State::ema)
      .def("reduce_", &State::reduce)
      .def("fused_", &State::fused);
}

}  // namespace
}  // namespace torch_fastdet::multi_tensor
