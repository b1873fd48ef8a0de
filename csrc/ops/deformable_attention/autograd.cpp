// Compute the gradient of deformable attention. The backward pass reads value, locations and weights again.
#include "ops/common/autograd.h"
#include "ops/deformable_attention/run.h"

namespace torch_fastdet::deformable_attention_autograd {
namespace {

struct DeformableAttention : torch::autograd::Function<DeformableAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& value, c10::SymIntArrayRef shapes,
                            const at::Tensor& locations, const at::Tensor& weights) {
    ctx->save_for_backward({value, locations, weights});
    ctx->saved_data["shapes"] = c10::IValue(shapes);
    return call_below_autograd<&torch_fastdet::deformable_attention<Meta>>(kDeformableAttention, value, shapes,
                                                                           locations, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const std::vector<c10::SymInt> shapes = ctx->saved_data["shapes"].toSymIntVector();
    const auto [value, locations, weights] = call_gradient<&deformable_attention_backward<Meta>>(
        "deformable_attention_backward", grads[0], saved[0], shapes, saved[1], saved[2]);
    return {value, at::Tensor(), locations, weights};
  }
};

at::Tensor deformable_attention(const at::Tensor& value, c10::SymIntArrayRef shapes, const at::Tensor& locations,
                                const at::Tensor& weights) {
  check_strided(value, kDeformableAttention, "value");
  check_strided(locations, kDeformableAttention, "locations");
  check_strided(weights, kDeformableAttention, "weights");
  return DeformableAttention::apply(value, shapes, locations, weights);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("deformable_attention", TORCH_FN(deformable_attention));
  first_gradient_only(m, "deformable_attention_backward", "deformable_attention", "grid_sample");
}

}  // namespace torch_fastdet::deformable_attention_autograd
