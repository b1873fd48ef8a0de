// Run the multi_tensor operators except the work itself: check, make rows, describe the work, and pass it to
// Backend::run(list, reduce, update, groups), which cpu.cpp and cuda.cpp each define. Meta runs nothing.
#pragma once

#include <cmath>

#include "ops/common/backend.h"
#include "ops/multi_tensor/checks.h"
#include "ops/multi_tensor/list.h"

namespace torch_fastdet::multi_tensor {

struct SgdOptions {
  double dampening, weight_decay;
  bool nesterov, maximize, is_first_step;
  const std::optional<at::Tensor>&grad_scale, &found_inf;
  using Types =
      std::tuple<double, double, bool, bool, bool, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&>;
};

template <class Backend>
void run_on(const List& list, const core::ReduceParams* reduce, const core::UpdateParams* update,
            c10::ArrayRef<core::Group> groups, std::initializer_list<at::TensorList> written) {
  if constexpr (!Backend::kMeta) {
    Backend::run(list, reduce, update, groups);
    for (const at::TensorList tensors : written) bump_versions(tensors);
  }
}

template <class Backend>
List ema_list(at::TensorList averages, at::TensorList values) {
  return make_list("multi_tensor_ema_",
                   {{core::kAverage, "averages", averages, true}, {core::kParam, "values", values, false}}, -1,
                   Backend::kMeta);
}

template <class Backend>
void run_ema(const List& list, at::TensorList averages, const core::Scalar& decay) {
  core::UpdateParams params = update();
  params.ema = true;
  params.decay = decay;
  run_on<Backend>(list, nullptr, &params, {}, {averages});
}

template <class Backend>
void ema(at::TensorList averages, at::TensorList values, double decay) {
  TORCH_CHECK_VALUE(std::isfinite(decay), "multi_tensor_ema_: decay is ", decay, ", but a finite number is expected");
  run_ema<Backend>(ema_list<Backend>(averages, values), averages, scalar(decay));
}

template <class Backend>
void ema_by_tensor(at::TensorList averages, at::TensorList values, const at::Tensor& decay) {
  const List list = ema_list<Backend>(averages, values);
  if (!list.rows.empty()) run_ema<Backend>(list, averages, scalar(decay, list, "multi_tensor_ema_", "decay"));
}

inline core::Group sgd_group(const char* op, double lr, double momentum, const SgdOptions& options) {
  check_hyper_parameter(op, "lr", lr);
  check_hyper_parameter(op, "momentum", momentum);
  check_hyper_parameter(op, "weight_decay", options.weight_decay);
  return {scalar(lr),  scalar(momentum), scalar(options.dampening), scalar(options.weight_decay),
          scalar(0.0), options.nesterov, options.maximize};
}

// `make_group(list)` returns the hyperparameters.
template <class Backend, typename MakeGroup>
void run_sgd(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, const SgdOptions& options,
             const char* op, const MakeGroup& make_group) {
  const bool unscales = options.grad_scale.has_value();
  const Operand param{core::kParam, "params", params, true}, grad{core::kGrad, "grads", grads, unscales};
  const Operand buffer{core::kMomentum, "momentum_buffers", momentum_buffers, true};
  const List list = momentum_buffers.empty() ? make_list(op, {param, grad}, 0, Backend::kMeta)
                                             : make_list(op, {param, grad, buffer}, 0, Backend::kMeta);
  const core::Group group = make_group(list);
  core::UpdateParams step = update();
  step.rule = core::Rule::kSgd;
  step.first_step = options.is_first_step;
  step.grad_scale = float_pointer(options.grad_scale, list, op, "grad_scale");
  step.found_inf = float_pointer(options.found_inf, list, op, "found_inf");
  step.write_grads = unscales;
  run_on<Backend>(list, nullptr, &step, group, {params, momentum_buffers, unscales ? grads : at::TensorList()});
}

template <class Backend>
void sgd(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, double lr, double momentum,
         const SgdOptions& options) {
  constexpr const char* kOp = "multi_tensor_sgd_";
  TORCH_CHECK(momentum == 0.0 || !momentum_buffers.empty() || params.empty(), kOp, ": momentum is ", momentum,
              ", but momentum_buffers is empty; one buffer for each tensor of params is expected");
  const core::Group group = sgd_group(kOp, lr, momentum, options);
  run_sgd<Backend>(params, grads, momentum == 0.0 ? at::TensorList{} : momentum_buffers, options, kOp,
                   [&](const List&) { return group; });
}

template <class Backend>
void sgd_by_tensor(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers, const at::Tensor& lr,
                   const at::Tensor& momentum, const SgdOptions& options) {
  constexpr const char* kOp = "multi_tensor_sgd_";
  core::Group group = sgd_group(kOp, 0.0, 0.0, options);
  run_sgd<Backend>(params, grads, momentum_buffers, options, kOp, [&](const List& list) {
    if (!list.rows.empty()) {
      group.lr = scalar(lr, list, kOp, "lr");
      group.momentum = scalar(momentum, list, kOp, "momentum");
    }
    return group;
  });
}

template <class Backend>
void unscale(at::TensorList grads, const at::Tensor& scale, const at::Tensor& found_inf) {
  constexpr const char* kOp = "multi_tensor_unscale_";
  const List list = make_list(kOp, {{core::kGrad, "grads", grads, true}}, -1, Backend::kMeta);
  if (list.rows.empty()) return;
  core::ReduceParams params = reduction();
  params.scale = float_pointer(scale, list, kOp, "scale");
  params.found_inf = float_pointer(found_inf, list, kOp, "found_inf");
  params.keep_found_inf = true;
  params.write_grads = true;
  run_on<Backend>(list, &params, nullptr, {}, {grads, found_inf});
}

template <class Backend>
at::Tensor norm(at::TensorList tensors) {
  const List list = make_list("multi_tensor_norm", {{core::kGrad, "tensors", tensors, false}}, -1, Backend::kMeta);
  core::ReduceParams params = reduction();
  const at::Tensor result = empty_norm(list, params);
  run_on<Backend>(list, &params, nullptr, {}, {});
  return as_torch_returns(result, list);
}

template <class Backend>
at::Tensor clip_grad_norm(at::TensorList grads, double max_norm) {
  const List list =
      make_list("multi_tensor_clip_grad_norm_", {{core::kGrad, "grads", grads, true}}, -1, Backend::kMeta);
  core::ReduceParams reduce = reduction();
  const at::Tensor result = empty_norm(list, reduce);
  reduce.clip = true;
  reduce.max_norm = max_norm;
  core::UpdateParams scale = update();
  scale.use_workspace = true;
  scale.write_grads = true;
  run_on<Backend>(list, &reduce, &scale, {}, {grads});
  return as_torch_returns(result, list);
}

template <class Backend>
void register_multi_tensor(torch::Library& m) {
  m.impl("multi_tensor_ema_", TORCH_FN(ema<Backend>));
  m.impl("multi_tensor_ema_.tensor", TORCH_FN(ema_by_tensor<Backend>));
  m.impl("multi_tensor_sgd_", unpack<&sgd<Backend>>);
  m.impl("multi_tensor_sgd_.tensor", unpack<&sgd_by_tensor<Backend>>);
  m.impl("multi_tensor_unscale_", TORCH_FN(unscale<Backend>));
  m.impl("multi_tensor_norm", TORCH_FN(norm<Backend>));
  m.impl("multi_tensor_clip_grad_norm_", TORCH_FN(clip_grad_norm<Backend>));
}

}  // namespace torch_fastdet::multi_tensor
