"""How many operations our operators take, and their formulas in ``torch.utils.flop_counter``.

``FlopCounterMode`` counts the operators of ``torch.ops.torch_fastdet`` after :func:`register`. ``import torch_fastdet`` calls it
if ``torch.utils.flop_counter`` is already imported; otherwise call it yourself. One addition, subtraction,
multiplication, division, minimum, maximum, comparison or transcendental function is one operation, a fused multiply-add two;
selections, conversions and sign changes are none. The counts are read off csrc/core/*/*_math.h.

A count follows from shapes only. What depends on values (how many candidates pass a threshold, how many targets match) is left
out: post-processing and the loss count what every input of that shape takes. The state objects behind
``torch_fastdet.optim`` and ``ModelEMA`` are not operators, and no mode sees them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

__all__ = ["FORMULAS", "register"]

Shape = Sequence[int]

# An IoU of one pair from its corners, its gradients by both boxes from its terms, the corners of two boxes, and the gradients
# by corners folded into those by the coordinates that were given.
IOU = {"iou": 15, "giou": 26, "diou": 37, "ciou": 55}
IOU_GRADIENT = {"iou": 32, "giou": 59, "diou": 71, "ciou": 94}
CORNERS = {True: 12, False: 6}  # by xywh
FOLD = {True: 16, False: 8}
SIGMOID = 3
BOX_DECODE = 12  # of four sigmoids: center and sides in pixels
ACTIVATION = {"silu": SIGMOID + 1, "relu": 1, "leaky_relu": 2, "hardswish": 5, "identity": 0}
ENTROPY = 16  # value and gradient of one logit, and its part of the sum
SOFTPLUS = 5  # entropy of a class that is not to be found, and its part of the sum
SCALE_BOX = {True: 6, False: 16}  # by xywh: a box in the original image's pixels; corners are clipped too


def iou(pairs: int, kind: str = "ciou", xywh: bool = True) -> int:
    return pairs * (CORNERS[xywh] + IOU[kind])


def iou_backward(pairs: int, kind: str = "ciou", xywh: bool = True) -> int:
    """Gradients by both boxes; the terms of the value are computed again."""
    return pairs * (CORNERS[xywh] + IOU[kind] + IOU_GRADIENT[kind] + FOLD[xywh])


def iou_loss(pairs: int, kind: str = "ciou", xywh: bool = True, reduced: bool = True) -> int:
    return iou(pairs, kind, xywh) + pairs * (2 if reduced else 1)


def upsample_backward(elements: int) -> int:
    """Each of `elements` input gradients is the sum of four."""
    return 3 * elements


def max_pools(pooled: int, kernel_size: int = 5) -> int:
    """Each value of a window is compared; backward each place of one. What is added up there depends on the values."""
    return pooled * kernel_size**2


def bn_act(elements: int, activation: str = "silu", residual: bool = False) -> int:
    """Mean and variance (four an element), the norm (three), the activation, and the shortcut's sum."""
    return elements * (4 + 3 + ACTIVATION[activation] + residual)


def bn_act_backward(elements: int, activation: str = "silu") -> int:
    """Twice the activation's input (three) and derivative (as two activations), once the sums (three) and the result (five)."""
    return elements * (2 * (3 + ACTIVATION[activation] + ACTIVATION[activation]) + 3 + 5)


def decode(anchors: int, outputs: int) -> int:
    """YOLOv5's decode: `outputs` values an anchor, box, objectness and classes."""
    return anchors * (SIGMOID * outputs + BOX_DECODE)


def match(detections: int, labels: int) -> int:
    """The IoU of each label with each detection of its image, and a comparison."""
    return detections * labels * (IOU["iou"] + 1)


def loss(anchors: int) -> int:
    """Objectness of every anchor; boxes and classes are computed for matches only."""
    return ENTROPY * anchors


def loss_backward(anchors: int) -> int:
    """The objectness gradient, scaled."""
    return anchors


def ema(elements: int) -> int:
    return 3 * elements


def sgd(elements: int, weight_decay: bool = True, momentum: bool = True, nesterov: bool = True) -> int:
    return elements * (2 + 2 * weight_decay + (3 + 2 * nesterov if momentum else 0))


def unscale(elements: int) -> int:
    """A multiplication and the check that the result is finite."""
    return 2 * elements


def norm(elements: int) -> int:
    return 2 * elements


def clip(elements: int) -> int:
    return norm(elements) + elements


# From here on: from the arguments of an operator, tensors replaced by their shapes, as register_flop_formula wants it.


def _pairs(box1: Shape, box2: Shape) -> int:
    longer = max(len(box1), len(box2)) - 1
    sizes = [[1] * (longer + 1 - len(box)) + list(box[:-1]) for box in (box1, box2)]
    return math.prod(b if a == 1 else a for a, b in zip(*sizes))


def _total(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _anchors(heads: Sequence[Shape], levels: Shape) -> int:
    """Anchors of YOLOv5 maps, (bs, na * no, ny, nx) or (bs, na, ny, nx, no), whose anchors have shape (nl, na, 2)."""
    return sum(h[0] * (math.prod(h[1:4]) if len(h) == 5 else levels[1] * h[2] * h[3]) for h in heads)


def _bbox_iou(box1, box2, xywh=True, GIoU=False, DIoU=False, CIoU=False, eps=1e-7, *, out_shape=None) -> int:
    kind = "ciou" if CIoU else "diou" if DIoU else "giou" if GIoU else "iou"
    return iou(_pairs(box1, box2), kind, xywh)


def _bbox_iou_backward(grad, box1, box2, kind, xywh, eps, output_mask, *, out_shape=None) -> int:
    return iou_backward(_pairs(box1, box2), kind, xywh)


def _iou_loss(box1, box2, kind="ciou", xywh=True, reduction="mean", eps=1e-7, *, out_shape=None) -> int:
    return iou_loss(_pairs(box1, box2), kind, xywh, reduction != "none")


def _iou_loss_backward(grad, box1, box2, kind, xywh, reduction, eps, output_mask, *, out_shape=None) -> int:
    return iou_backward(_pairs(box1, box2), kind, xywh)


def _moves_alone(*args, out_shape=None, **kwargs) -> int:
    return 0


def _says_no_shape(*args, out_shape=None, **kwargs) -> int:
    """Pictures: whether a pixel is warped, mixed or recoloured is written in the tables, and no shape says it."""
    return 0


def _bn_act(x, weight, bias, running_mean=None, running_var=None, num_batches_tracked=None, momentum=0.1, eps=1e-5,
            activation="silu", slope=0.01, residual=None, *, out_shape=None) -> int:  # fmt: skip
    return bn_act(math.prod(x), activation, residual is not None)


def _bn_act_cat(x, weight, bias, running_mean, running_var, num_batches_tracked, momentum=0.1, eps=1e-5,
                activation="silu", slope=0.01, residual=None, *, out_shape=None) -> int:  # fmt: skip
    shortcut = 0 if residual is None else math.prod(residual)
    return sum(bn_act(math.prod(part), activation) for part in x) + shortcut


def _bn_act_backward(grad_y, x, weight, bias, mean, invstd, activation, slope, *, out_shape=None) -> int:
    return bn_act_backward(math.prod(x), activation)


def _upsample_backward(grad_output, *, out_shape=None) -> int:
    return upsample_backward(math.prod(grad_output) // 4)


def _max_pools_cat(x, kernel_size=5, pools=3, *, out_shape=None) -> int:
    return max_pools(math.prod(x) * pools, kernel_size)


def _max_pools_cat_backward(grad_y, indices, kernel_size=5, pools=3, *, out_shape=None) -> int:
    return max_pools(math.prod(indices), kernel_size)


def _yolov5_decode(heads, anchors, strides, nm=0, *, out_shape=None) -> int:
    count = _anchors(heads, anchors)
    return decode(count, _total(heads) // count - nm) if count else 0


def _compares_objectness(prediction, *args, out_shape=None, **kwargs) -> int:
    return prediction[0] * prediction[1]


def _compares_classes(prediction, *args, nc=0, out_shape=None, **kwargs) -> int:
    if len(args) > 6:  # nc by position
        nc = args[6]
    return prediction[0] * (nc or max(prediction[1] - 4, 0)) * prediction[2]


def _yolov5_postprocess(heads, anchors, *args, out_shape=None, **kwargs) -> int:
    return _anchors(heads, anchors)


def _ultralytics_postprocess(boxes, scores, *args, out_shape=None, **kwargs) -> int:
    return _total(scores)


def _scale_boxes(boxes, letterboxes, xywh=False, *, out_shape=None) -> int:
    return math.prod(boxes[:-1]) * SCALE_BOX[xywh]


def _match(detections, labels, *args, out_shape=None, **kwargs) -> int:
    return match(detections[-2], labels[0])


def _confusion(matrix, detections, labels, *args, out_shape=None, **kwargs) -> int:
    return match(detections[-2], labels[0])


def _yolov5_loss(heads, targets, anchors, *args, out_shape=None, **kwargs) -> int:
    return loss(_anchors(heads, anchors))


def _yolov5_loss_backward(
    grad, heads, targets, levels, owner, match_cell, match_values, object_gradient, **kwargs
) -> int:
    return loss_backward(math.prod(object_gradient))


def _v8_class_logits(heads: Sequence[Shape], reg_max: int) -> int:
    if len(heads[0]) == 3:  # boxes and scores of all levels
        return math.prod(heads[1])
    return sum(math.prod(head) // head[1] * (head[1] - 4 * reg_max) for head in heads)


def _v8_loss(heads, *args, reg_max=16, out_shape=None, **kwargs) -> int:
    return _v8_class_logits(heads, reg_max) * SOFTPLUS


def _v8_loss_backward(grad, heads, *args, reg_max=16, out_shape=None, **kwargs) -> int:
    return _v8_class_logits(heads, reg_max) * (SIGMOID + 1)


def instance_masks(masks: int, channels: int, low: int, pixels: int) -> int:
    """Logits of `low` pixels of the prototypes, and `pixels` of the mask, each mixed of four and compared."""
    return masks * (low * 2 * channels + pixels * 9)


def _instance_masks(protos, coefficients, boxes, size, *args, out_shape=None, **kwargs) -> int:
    """Of boxes that cover the picture; outside a box nothing is computed."""
    channels, height, width = protos[-3:]
    return instance_masks(math.prod(coefficients[:-1]), channels, height * width, size[0] * size[1])


def _ema(averages, values, decay, *, out_shape=None) -> int:
    return ema(_total(averages))


def _sgd(params, grads, buffers, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False,
         is_first_step=False, grad_scale=None, found_inf=None, *, out_shape=None) -> int:  # fmt: skip
    elements = _total(params)
    scaled = elements if grad_scale is not None else 0
    return sgd(elements, weight_decay != 0, bool(buffers), nesterov) + scaled


def _unscale(grads, scale, found_inf, *, out_shape=None) -> int:
    return unscale(_total(grads))


def _norm(tensors, *, out_shape=None) -> int:
    return norm(_total(tensors))


def _clip(grads, max_norm, *, out_shape=None) -> int:
    return clip(_total(grads))


#: Operator -> formula, for every operator of the library.
FORMULAS: dict[str, Callable[..., int]] = {
    "bbox_iou": _bbox_iou,
    "bbox_iou_backward": _bbox_iou_backward,
    "iou_loss": _iou_loss,
    "iou_loss_backward": _iou_loss_backward,
    "bn_act": _bn_act,
    "bn_act_backward": _bn_act_backward,
    "bn_act_cat": _bn_act_cat,
    "space_to_depth": _moves_alone,
    "space_to_depth_backward": _moves_alone,
    "max_pools_cat": _max_pools_cat,
    "max_pools_cat_backward": _max_pools_cat_backward,
    "upsample_nearest2x": _moves_alone,
    "upsample_nearest2x_backward": _upsample_backward,
    "upsample_nearest2x_cat": _moves_alone,
    "yolov5_decode": _yolov5_decode,
    "non_max_suppression_padded": _compares_objectness,
    "ultralytics_non_max_suppression_padded": _compares_classes,
    "yolov5_postprocess": _yolov5_postprocess,
    "ultralytics_postprocess": _ultralytics_postprocess,
    "scale_boxes": _scale_boxes,
    "instance_masks": _instance_masks,
    "match_detections": _match,
    "confusion_matrix_": _confusion,
    "yolov5_loss": _yolov5_loss,
    "yolov5_loss_backward": _yolov5_loss_backward,
    "image_augment": _says_no_shape,
    "image_augment_": _says_no_shape,
    "image_letterbox": _says_no_shape,
    "image_letterbox_": _says_no_shape,
    "image_resize_": _says_no_shape,
    "v8_loss": _v8_loss,
    "v8_loss_backward": _v8_loss_backward,
    "multi_tensor_ema_": _ema,
    "multi_tensor_sgd_": _sgd,
    "multi_tensor_unscale_": _unscale,
    "multi_tensor_norm": _norm,
    "multi_tensor_clip_grad_norm_": _clip,
}


def register() -> None:
    """Adds the formulas to ``torch.utils.flop_counter``. A second call changes nothing. A formula that a user registered stays.

    ``import torch_fastdet`` calls this if ``torch.utils.flop_counter`` is already imported. It does not import that module itself,
    because that takes as long as the rest of torch_fastdet does.
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for name, formula in FORMULAS.items():
        packet = getattr(torch.ops.torch_fastdet, name)
        if packet not in flop_registry:
            register_flop_formula(packet)(formula)
