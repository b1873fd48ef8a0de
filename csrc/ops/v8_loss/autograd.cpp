// The forward pass of the v8 losses saves each anchor's target and score. The backward pass reads the logits again and
// writes each head's gradient, already multiplied by the incoming one.
#include "ops/common/autograd.h"
#include "ops/v8_loss/run.h"

namespace torch_fastdet::v8_loss_autograd {
namespace {

using Levels = V8LevelsOn<Meta>::Types;
using Arguments = V8LossArguments<c10::SymInt>;

void save_levels(AutogradContext* context, const Levels& levels) {
  const auto& [strides, sizes] = levels;
  context->saved_data["strides"] = strides.vec();
  context->saved_data["sizes"] = c10::IValue(sizes);
}

std::pair<std::vector<double>, std::vector<c10::SymInt>> saved_levels(AutogradContext* context) {
  return {context->saved_data["strides"].toDoubleVector(), context->saved_data["sizes"].toSymIntVector()};
}

// Tell HeadLoss of a loss: the operator, the heads, Inputs between them and the targets, the Rest, the gradients.
struct Upright {
  static auto unpacked(at::TensorList heads) { return std::make_tuple(heads); }
  template <typename... Each>
  static std::vector<at::Tensor> gradients(const at::Tensor& grad, at::TensorList heads, const Each&... each) {
    return call_gradient<&v8_loss_backward<Meta>>("v8_loss_backward", grad, heads, each...);
  }
};

struct Detection : Upright {
  static constexpr auto kName = "v8_loss";
  static constexpr auto kLoss = &v8_loss<Meta>;
  using Inputs = std::tuple<>;
  using Rest = std::tuple<>;
};

struct Masked : Upright {
  static constexpr auto kName = "v8_masked_loss";
  static constexpr auto kLoss = &v8_masked_loss<Meta>;
  using Inputs = V8MaskInputs::Types;
  using Rest = std::tuple<bool>;  // overlap
};

struct Posed : Upright {
  static constexpr auto kName = "v8_posed_loss";
  static constexpr auto kLoss = &v8_posed_loss<Meta>;
  using Inputs = V8PoseInputs::Types;
  using Rest = std::tuple<>;
};

// The heads are boxes, scores and angles.
struct Rotated {
  static constexpr auto kName = "v8_obb_loss";
  static constexpr auto kLoss = &v8_obb_loss<Meta>;
  using Inputs = std::tuple<>;
  using Rest = std::tuple<>;
  static auto unpacked(at::TensorList heads) { return std::tie(heads[0], heads[1], heads[2]); }
  template <typename... Each>
  static std::vector<at::Tensor> gradients(const at::Tensor& grad, at::TensorList heads, const Each&... each) {
    auto [boxes, scores, angles] =
        call_gradient<&v8_obb_loss_backward<Meta>>("v8_obb_loss_backward", grad, heads[0], heads[1], heads[2], each...);
    return {boxes, scores, angles};
  }
};

template <class Task>
struct HeadLoss : torch::autograd::Function<HeadLoss<Task>> {
  static variable_list forward(AutogradContext* context, at::TensorList heads, const typename Task::Inputs& inputs,
                               const Arguments::Types& arguments, const typename Task::Rest& rest) {
    const auto a = options_from<Arguments>(arguments);
    const auto call = [](const auto&... each) { return call_below_autograd<Task::kLoss>(Task::kName, each...); };
    auto [loss, items, scales, slot_anchor, slot_row, slot_score, status] =
        std::apply(call, std::tuple_cat(Task::unpacked(heads), inputs, arguments, rest));
    variable_list saved{a.targets, scales, slot_anchor, slot_row, slot_score, a.class_weights.value_or(at::Tensor())};
    saved.insert(saved.end(), heads.begin(), heads.end());
    context->save_for_backward(std::move(saved));
    context->mark_non_differentiable({items, scales, slot_anchor, slot_row, slot_score, status});
    context->set_materialize_grads(false);  // else autograd would fill a zero tensor for each of these
    save_levels(context, {a.strides, a.sizes});
    context->saved_data["reg_max"] = a.reg_max;
    return {loss, items, scales, slot_anchor, slot_row, slot_score, status};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::TensorList heads(saved.data() + 6, saved.size() - 6);
    variable_list result(heads.size());
    if (gradients[0].defined()) {
      std::optional<at::Tensor> class_weights;
      if (saved[5].defined()) class_weights = saved[5];
      const auto [strides, sizes] = saved_levels(context);
      result = Task::gradients(gradients[0], heads, saved[0], saved[1], saved[2], saved[3], saved[4], strides, sizes,
                               class_weights, context->saved_data["reg_max"].toInt());
    }
    result.resize(result.size() + 3);  // there are no gradients of the arguments after the heads
    return result;
  }
};

template <class Task>
constexpr auto head_loss = unpack<&Applied<HeadLoss<Task>, V8LossResult>::call>;

// Describe a framework's mask part: the operator, whether positives may share an anchor, arguments after the masks.
struct OfSlots {
  static constexpr auto kName = "v8_mask_loss";
  static constexpr auto kLoss = &v8_mask_loss<Meta>;
  static constexpr bool kShared = false;
  using Rest = std::tuple<const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, V8SymInts<Meta>,
                          const std::optional<at::Tensor>&, bool>;
};

struct OfMatches {
  static constexpr auto kName = "yolov5_mask_loss";
  static constexpr auto kLoss = &yolov5_mask_loss<Meta>;
  static constexpr bool kShared = true;
  using Rest =
      std::tuple<const at::Tensor&, const at::Tensor&, V8SymInts<Meta>, const std::optional<at::Tensor>&, double, bool>;
};

template <class Task>
struct MaskLoss : torch::autograd::Function<MaskLoss<Task>> {
  static variable_list forward(AutogradContext* context, const at::Tensor& coefficients, const at::Tensor& protos,
                               const at::Tensor& masks, const typename Task::Rest& rest) {
    const auto call = [&](const auto&... each) {
      return call_below_autograd<Task::kLoss>(Task::kName, coefficients, protos, masks, each...);
    };
    auto [loss, item, scale, positives, first, unit] = std::apply(call, rest);
    context->save_for_backward({coefficients, protos, masks, scale, positives, first, unit});
    context->mark_non_differentiable({item, scale, positives, first, unit});
    context->set_materialize_grads(false);
    context->saved_data["overlap"] = std::get<bool>(rest);
    return {loss, item, scale, positives, first, unit};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    variable_list result(4);
    if (gradients[0].defined()) {
      const std::array<bool, 2> output_mask{context->needs_input_grad(0), context->needs_input_grad(1)};
      std::tie(result[0], result[1]) = call_gradient<&v8_mask_loss_backward<Meta>>(
          "v8_mask_loss_backward", gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6],
          context->saved_data["overlap"].toBool(), bool{Task::kShared}, output_mask);
    }
    return result;
  }
};

template <class Task>
constexpr auto mask_loss = unpack<&Applied<MaskLoss<Task>, V8MaskLossResult>::call>;

using Labels = V8KeypointLabels::Types;

struct V8KeypointLoss : torch::autograd::Function<V8KeypointLoss> {
  static variable_list forward(AutogradContext* context, const at::Tensor& predictions, const Labels& labels,
                               const at::Tensor& gains, const at::Tensor& settings, const Levels& levels,
                               bool centered) {
    const auto call = [&](const auto&... each) {
      return call_below_autograd<&v8_keypoint_loss<Meta>>("v8_keypoint_loss", predictions, each..., centered);
    };
    auto [loss, items, scales] = std::apply(call, std::tuple_cat(labels, std::tie(gains, settings), levels));
    context->saved_data["centered"] = centered;
    const auto& [keypoints, sigmas, targets, slot_anchor, slot_row] = labels;
    context->save_for_backward({predictions, keypoints, sigmas, targets, slot_anchor, slot_row, scales});
    context->mark_non_differentiable({items, scales});
    context->set_materialize_grads(false);
    save_levels(context, levels);
    return {loss, items, scales};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    variable_list result(6);
    if (gradients[0].defined()) {
      const auto [strides, sizes] = saved_levels(context);
      result[0] = call_gradient<&v8_keypoint_loss_backward<Meta>>(
          "v8_keypoint_loss_backward", gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5],
          saved[6], strides, sizes, context->saved_data["centered"].toBool());
    }
    return result;
  }
};

V8LossResult v8_obb_loss_autograd(const V8ObbOutputs::Types& outputs, const Arguments::Types& arguments) {
  const auto& [boxes, scores, angles] = outputs;
  return Applied<HeadLoss<Rotated>, V8LossResult>::call({boxes, scores, angles}, {}, arguments, {});
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("v8_loss", head_loss<Detection>);
  first_gradient_only(m, "v8_loss_backward", "v8_loss", "Ultralytics' own v8DetectionLoss");
  m.impl("v8_masked_loss", head_loss<Masked>);
  m.impl("v8_posed_loss", head_loss<Posed>);
  m.impl("v8_mask_loss", mask_loss<OfSlots>);
  m.impl("yolov5_mask_loss", mask_loss<OfMatches>);
  first_gradient_only(m, "v8_mask_loss_backward", "v8_mask_loss", "the stock loss");
  m.impl("v8_obb_loss", unpack<&v8_obb_loss_autograd>);
  first_gradient_only(m, "v8_obb_loss_backward", "v8_obb_loss", "Ultralytics' own v8OBBLoss");
  m.impl("v8_keypoint_loss", unpack<&Applied<V8KeypointLoss, V8KeypointLossResult>::call>);
  first_gradient_only(m, "v8_keypoint_loss_backward", "v8_keypoint_loss", "Ultralytics' own v8PoseLoss");
}

}  // namespace torch_fastdet::v8_loss_autograd
