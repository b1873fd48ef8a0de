// Check the arguments of bn_act and bn_act_backward, and turn tensors into the strides that the core walks.
#pragma once

#include <string_view>

#include "core/bn_act/bn_act_math.h"
#include "core/bn_act/bn_act_plan.h"
#include "ops/common/checks.h"

namespace torch_fastdet {

using BnActResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;

inline bool is_given(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

// Hold the state of BatchNorm2d besides its parameters, as the schema lists it.
struct BnActNorm {
  const OptionalTensor &running_mean, &running_var, &num_batches_tracked;
  double momentum, eps;
  using Types = std::tuple<const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double, double>;
};

struct BnActActivation {
  std::string_view name;
  double slope;  // of LeakyReLU
  using Types = std::tuple<std::string_view, double>;
};

inline core::Activation parse_activation(std::string_view activation, const char* op) {
  if (activation == "silu") return core::Activation::kSiLU;
  if (activation == "relu") return core::Activation::kReLU;
  if (activation == "leaky_relu") return core::Activation::kLeakyReLU;
  if (activation == "hardswish") return core::Activation::kHardswish;
  TORCH_CHECK_VALUE(activation == "identity", op, ": activation is '", activation,
                    "', but 'silu', 'relu', 'leaky_relu', 'hardswish' or 'identity' is expected");
  return core::Activation::kIdentity;
}

inline void check_bn_act_vector(const at::Tensor& x, const OptionalTensor& vector, const char* op, const char* name) {
  if (!is_given(vector)) return;
  check_operand(x, "x", *vector, op, name);
  TORCH_CHECK(vector->dim() == 1, op, ": ", name, " has shape ", vector->sym_sizes(), ", but (C,) is expected");
  TORCH_SYM_CHECK(vector->sym_size(0).sym_eq(x.sym_size(1)), op, ": ", name, " has shape ", vector->sym_sizes(),
                  ", but (", x.sym_size(1), ",) is expected beside x of shape ", x.sym_sizes());
}

// Check a statistic. It is written in place, so a copy would not do.
inline void check_bn_act_statistic(const at::Tensor& x, const OptionalTensor& statistic, const char* op,
                                   const char* name) {
  check_bn_act_vector(x, statistic, op, name);
  if (!is_given(statistic)) return;
  TORCH_CHECK(statistic->is_contiguous(), op, ": ", name, " has stride ", statistic->sym_stride(0),
              ", but a contiguous tensor is expected");
  TORCH_CHECK(!statistic->requires_grad(), op, ": ", name,
              " requires grad, but it is written in place; give it detached");
}

inline void check_same_image(const at::Tensor& x, const at::Tensor& other, const char* op, const char* name) {
  check_images(other, op, name);
  check_same_device(x, "x", other, op, name);
  TORCH_CHECK(other.scalar_type() == x.scalar_type(), op, ": ", name, " has dtype ", dtype_name(other.scalar_type()),
              ", but x has ", dtype_name(x.scalar_type()));
  TORCH_SYM_CHECK(same_sizes(x, other, {0, 1, 2, 3}), op, ": ", name, " has shape ", other.sym_sizes(), ", but x has ",
                  x.sym_sizes());
}

// Check, with PyTorch's message, that a channel has more than one value, and so a variance.
inline void check_values_per_channel(const at::Tensor& x) {
  int64_t values = 1;
  for (const int64_t d : {0, 2, 3}) {
    const auto size = x.sym_size(d).maybe_as_int();
    if (!size) return;  // symbolic: the kernel's own check covers it
    values *= *size;
  }
  TORCH_CHECK_VALUE(values != 1, "Expected more than 1 value per channel when training, got input size ",
                    x.sym_sizes());
}

inline void check_bn_act(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                         const BnActNorm& norm, const OptionalTensor& residual, const char* op) {
  check_images(x, op, "x");
  check_bn_act_vector(x, weight, op, "weight");
  check_bn_act_vector(x, bias, op, "bias");
  check_bn_act_statistic(x, norm.running_mean, op, "running_mean");
  check_bn_act_statistic(x, norm.running_var, op, "running_var");
  if (const OptionalTensor& counter = norm.num_batches_tracked; is_given(counter)) {
    check_same_device(x, "x", *counter, op, "num_batches_tracked");
    TORCH_CHECK(counter->scalar_type() == at::kLong && counter->dim() == 0, op, ": num_batches_tracked has dtype ",
                dtype_name(counter->scalar_type()), " and shape ", counter->sym_sizes(),
                ", but one int64 without dimensions is expected");
  }
  if (is_given(residual)) check_same_image(x, *residual, op, "residual");
  check_values_per_channel(x);
}

inline at::Tensor empty_like_image(const at::Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options().memory_format(x.suggest_memory_format()));
}

inline BnActResult empty_bn_act(const at::Tensor& x) {
  const auto options = x.options().dtype(arithmetic_type(x));
  return {empty_like_image(x), at::empty_symint({x.sym_size(1)}, options), at::empty_symint({x.sym_size(1)}, options)};
}

// Hold one part of bn_act_cat's result.
struct BnActPart {
  OptionalTensor weight, bias, running_mean, running_var, num_batches_tracked;
  double momentum, eps;
  BnActNorm norm() const { return {running_mean, running_var, num_batches_tracked, momentum, eps}; }
};

// Hold the lists of bn_act_cat and the options that its parts share, in the schema's order.
struct BnActParts {
  at::TensorList weight, bias, running_mean, running_var, num_batches_tracked;
  double momentum, eps;
  using Types =
      std::tuple<at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, double, double>;

  BnActPart operator[](size_t i) const {
    const auto entry = [i](at::TensorList list) { return list.empty() ? OptionalTensor() : OptionalTensor(list[i]); };
    return {weight[i], bias[i], entry(running_mean), entry(running_var), entry(num_batches_tracked), momentum, eps};
  }
};

inline void check_bn_act_lists(size_t size, const char* name, const BnActParts& parts, const char* op) {
  const auto check_length = [&](at::TensorList list, const char* list_name, bool may_be_empty) {
    TORCH_CHECK(list.size() == size || (may_be_empty && list.empty()), op, ": ", list_name, " has ", list.size(),
                " entries, but ", name, " has ", size);
  };
  check_length(parts.weight, "weight", false);
  check_length(parts.bias, "bias", false);
  check_length(parts.running_mean, "running_mean", true);
  check_length(parts.running_var, "running_var", true);
  check_length(parts.num_batches_tracked, "num_batches_tracked", true);
}

// Check that entry i of a list matches `other` except for the channels.
inline void check_bn_act_neighbours(const at::Tensor& other, const char* other_name, const at::Tensor& entry,
                                    const char* name, size_t i, const char* op) {
  check_same_device(other, other_name, entry, op, name);
  TORCH_CHECK(entry.scalar_type() == other.scalar_type(), op, ": ", name, "[", i, "] has dtype ",
              dtype_name(entry.scalar_type()), ", but ", other_name, " has ", dtype_name(other.scalar_type()));
  TORCH_SYM_CHECK(same_sizes(entry, other, {0, 2, 3}), op, ": ", name, "[", i, "] has shape ", entry.sym_sizes(),
                  ", but ", other_name, " has ", other.sym_sizes(), "; all sizes but the channels must be equal");
}

// Check the parts of x, which are adjacent along its channels.
inline void check_bn_act_part_sizes(const at::Tensor& x, at::TensorList list, const char* name, const char* op) {
  c10::SymInt channels = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    check_images(list[i], op, name);
    check_bn_act_neighbours(x, "x", list[i], name, i, op);
    channels += list[i].sym_size(1);
  }
  TORCH_SYM_CHECK(channels.sym_eq(x.sym_size(1)), op, ": ", name, " has ", channels, " channels in all, but x has ",
                  x.sym_size(1));
}

// The residual belongs to the first part.
inline void check_bn_act_cat(at::TensorList x, const BnActParts& parts, const OptionalTensor& residual,
                             const char* op) {
  TORCH_CHECK(!x.empty(), op, ": x is an empty list, but one tensor or more is expected");
  check_bn_act_lists(x.size(), "x", parts, op);
  for (size_t i = 0; i < x.size(); ++i) {
    const BnActPart part = parts[i];
    check_bn_act(x[i], part.weight, part.bias, part.norm(), i == 0 ? residual : OptionalTensor(), op);
    check_bn_act_neighbours(x[0], "x[0]", x[i], "x", i, op);
  }
}

// Return results that are channels_last if all parts are, else contiguous, like torch.cat.
inline BnActResult empty_bn_act_cat(at::TensorList x) {
  c10::SymInt channels = 0;
  auto format = x[0].suggest_memory_format();
  for (const at::Tensor& part : x) {
    channels += part.sym_size(1);
    if (part.suggest_memory_format() != format) format = at::MemoryFormat::Contiguous;
  }
  const at::Tensor& like = x[0];
  const auto options = like.options().dtype(arithmetic_type(like));
  return {at::empty_symint({like.sym_size(0), channels, like.sym_size(2), like.sym_size(3)},
                           like.options().memory_format(format)),
          at::empty_symint({channels}, options), at::empty_symint({channels}, options)};
}

// Return an empty gradient; it has no elements if there is no such parameter.
inline at::Tensor empty_parameter_grad(const at::Tensor& x, const OptionalTensor& parameter) {
  return is_given(parameter) ? at::empty_symint(parameter->sym_sizes(), parameter->options())
                             : at::empty({0}, x.options().dtype(arithmetic_type(x)));
}

inline void check_bn_act_statistics(const at::Tensor& x, const at::Tensor& mean, const at::Tensor& invstd,
                                    const char* op) {
  for (const auto& [tensor, name] : {std::pair{&mean, "mean"}, std::pair{&invstd, "invstd"}}) {
    check_bn_act_vector(x, *tensor, op, name);
    check_dtype(*tensor, arithmetic_type(x), op, name);
  }
}

inline void check_bn_act_backward(const at::Tensor& grad_y, const at::Tensor& x, const OptionalTensor& weight,
                                  const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& invstd,
                                  const char* op) {
  check_images(x, op, "x");
  check_same_image(x, grad_y, op, "grad_y");
  check_bn_act_vector(x, weight, op, "weight");
  check_bn_act_vector(x, bias, op, "bias");
  check_bn_act_statistics(x, mean, invstd, op);
}

// Return whether the pixels of an image are evenly spaced, and its channels (channels_last) or pixels adjacent.
inline bool is_walkable(const at::Tensor& tensor, bool channels_last) {
  const int64_t width = tensor.size(3);
  const int64_t pixel = width > 1 ? tensor.stride(3) : tensor.stride(2);
  const bool even = width <= 1 || tensor.size(2) <= 1 || tensor.stride(2) == width * tensor.stride(3);
  if (channels_last) return even && (tensor.stride(1) == 1 || tensor.size(1) <= 1);
  return even && (pixel == 1 || tensor.size(2) * width <= 1);
}

// Return the tensor itself, or a copy in that layout.
inline at::Tensor walkable(const at::Tensor& tensor, bool channels_last) {
  return is_walkable(tensor, channels_last) ? tensor : tensor.contiguous(memory_format(channels_last));
}

// Refuse an empty tensor, for which a grid has no plan and statistics have no value.
inline void check_bn_act_not_empty(const at::Tensor& x, const char* op) {
  TORCH_SYM_CHECK(x.sym_numel().sym_gt(0), op, ": x has shape ", x.sym_sizes(),
                  ", but at least one element is expected");
}

inline void check_bn_act_parts(const at::Tensor& x, at::TensorList y, const BnActParts& parts,
                               const OptionalTensor& residual, const char* op) {
  check_images(x, op, "x");
  check_bn_act_not_empty(x, op);
  TORCH_CHECK(!y.empty() && y.size() <= core::kBnActMostParts, op, ": y has ", y.size(), " entries, but 1 to ",
              core::kBnActMostParts, " are expected");
  check_bn_act_lists(y.size(), "y", parts, op);
  check_bn_act_part_sizes(x, y, "y", op);
  for (size_t i = 0; i < y.size(); ++i) {
    const BnActPart part = parts[i];
    check_bn_act(y[i], part.weight, part.bias, part.norm(), residual, op);
  }
  TORCH_CHECK(!is_given(residual) || y.size() == 1, op, ": y has ", y.size(),
              " entries, but one is expected beside a residual");
}

// Check the arguments of bias_act. It has no gradient and may overwrite x.
inline void check_bias_act(const at::Tensor& x, const at::Tensor& y, const OptionalTensor& weight,
                           const OptionalTensor& bias, const OptionalTensor& mean, const OptionalTensor& variance,
                           const OptionalTensor& residual, const OptionalTensor& last, const char* op) {
  check_images(x, op, "x");
  check_same_image(x, y, op, "y");
  check_bn_act_vector(x, weight, op, "weight");
  check_bn_act_vector(x, bias, op, "bias");
  check_bn_act_vector(x, mean, op, "mean");
  check_bn_act_vector(x, variance, op, "variance");
  if (is_given(residual)) check_same_image(x, *residual, op, "residual");
  if (!is_given(last)) return;
  check_images(*last, op, "last");
  TORCH_SYM_CHECK(last->sym_size(1).sym_le(x.sym_size(1)), op, ": last has ", last->sym_size(1),
                  " channels, but at most those of x, ", x.sym_size(1), ", are expected");
  check_same_image(x.narrow_symint(1, x.sym_size(1) - last->sym_size(1), last->sym_size(1)), *last, op, "last");
}

inline void check_bn_act_parts_backward(at::TensorList grad_y, const at::Tensor& x, at::TensorList weight,
                                        at::TensorList bias, const at::Tensor& mean, const at::Tensor& invstd,
                                        const char* op) {
  check_images(x, op, "x");
  check_bn_act_not_empty(x, op);
  check_bn_act_part_sizes(x, grad_y, "grad_y", op);
  TORCH_CHECK(!grad_y.empty() && grad_y.size() <= core::kBnActMostParts, op, ": grad_y has ", grad_y.size(),
              " entries, but 1 to ", core::kBnActMostParts, " are expected");
  for (const auto& [list, name] : {std::pair{&weight, "weight"}, std::pair{&bias, "bias"}}) {
    TORCH_CHECK(list->size() == grad_y.size(), op, ": ", name, " has ", list->size(), " entries, but grad_y has ",
                grad_y.size());
    for (size_t i = 0; i < list->size(); ++i) {
      check_bn_act_vector(grad_y[i], (*list)[i], op, name);
      TORCH_CHECK((*list)[i].scalar_type() == (*list)[0].scalar_type(), op, ": ", name, "[", i, "] has dtype ",
                  dtype_name((*list)[i].scalar_type()), ", but ", name, "[0] has ",
                  dtype_name((*list)[0].scalar_type()));
    }
  }
  check_bn_act_statistics(x, mean, invstd, op);
}

struct ImageStrides {
  int64_t image, pixel, channel;
};

inline ImageStrides image_strides(const at::Tensor& tensor) {
  const int64_t pixel = tensor.size(3) > 1 ? tensor.stride(3) : tensor.size(2) > 1 ? tensor.stride(2) : 1;
  return {tensor.size(0) > 1 ? tensor.stride(0) : 0, pixel, tensor.size(1) > 1 ? tensor.stride(1) : 1};
}

}  // namespace torch_fastdet
