// Register post-processing with autograd. Decoding has a gradient; the results of suppression are detached, so that
// backward() raises.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid.h>

#include "ops/common/autograd.h"
#include "ops/nms/run.h"

namespace torch_fastdet::nms_autograd {
namespace {

struct Yolov5Decode : torch::autograd::Function<Yolov5Decode> {
  static at::Tensor forward(AutogradContext* context, at::TensorList heads, const at::Tensor& anchors,
                            at::ArrayRef<double> strides, int64_t nm) {
    for (const at::Tensor& head : heads) check_strided(head, "yolov5_decode", "heads");
    variable_list saved{anchors};
    saved.insert(saved.end(), heads.begin(), heads.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["strides"] = strides.vec();
    context->saved_data["nm"] = nm;
    return call_below_autograd<&yolov5_decode<Meta>>("yolov5_decode", heads, anchors, strides, nm);
  }

  // Return d/d logit of xy = (2 s + ...) stride, wh = (2 s)^2 anchor stride, s for objectness and classes, else itself.
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto strides = context->saved_data["strides"].toDoubleVector();
    const int64_t nm = context->saved_data["nm"].toInt();
    variable_list result;
    c10::SymInt first = 0;
    for (size_t level = 0; level < strides.size(); ++level) {
      const at::Tensor& head = saved[1 + level];
      const c10::SymInt na = saved[0].sym_size(1), images = head.sym_size(0);
      const bool split = head.dim() == 5;
      const c10::SymInt rows = head.sym_size(2), columns = head.sym_size(3);
      const c10::SymInt no = split ? head.sym_size(4) : head.sym_size(1) / na;
      const c10::SymInt count = na * rows * columns, scored = no - 4 - nm;
      const auto type = arithmetic_type(head);
      const at::Tensor logits =
          (split ? head : head.view_symint({images, na, no, rows, columns}).permute({0, 1, 3, 4, 2})).to(type);
      const at::Tensor grad =
          grads[0].slice_symint(1, first, first + count).view_symint({images, na, rows, columns, no}).to(type);
      const at::Tensor s = at::sigmoid(logits.slice_symint(4, 0, no - nm));
      const at::Tensor slope = grad.slice_symint(4, 0, no - nm) * s * (-s + 1);
      const at::Tensor anchor =
          saved[0].select(0, static_cast<int64_t>(level)).view_symint({na, 1, 1, 2}).to(s.options());
      at::Tensor by_head = at::cat({slope.slice(4, 0, 2) * (2 * strides[level]),
                                    slope.slice(4, 2, 4) * s.slice(4, 2, 4) * (anchor * (8 * strides[level])),
                                    slope.slice_symint(4, 4, 4 + scored), grad.slice_symint(4, no - nm, no)},
                                   4);
      if (!split) by_head = by_head.permute({0, 1, 4, 2, 3}).reshape_symint(head.sym_sizes());
      result.push_back(by_head.to(head.scalar_type()));
      first += count;
    }
    result.resize(result.size() + 3);  // anchors, strides and nm
    return result;
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_fastdet, Autograd, m) {
  m.impl("yolov5_decode", &Applied<Yolov5Decode, at::Tensor>::call);
  without_gradient(m, {"non_max_suppression_padded", "ultralytics_non_max_suppression_padded", "yolov5_postprocess",
                       "ultralytics_postprocess", "filter_detections", "scale_boxes"});
}

}  // namespace torch_fastdet::nms_autograd
