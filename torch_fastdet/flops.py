"""Counts the operations of torch_fastdet's operators, and registers the counts with ``torch.utils.flop_counter``.

One addition, multiplication, comparison or transcendental function is one operation, a fused multiply-add two; selections, conversions and
sign changes are none. A count follows from shapes only: how many candidates pass a threshold, or how many targets match, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from torch_fastdet._torch.private import operator_arguments

__all__ = ["FORMULAS", "register"]

Shape = Sequence[int]

# Operations for one pair of boxes: the IoU from corners, its gradients from its terms, corners from the given coordinates, and the
# gradients of these.
IOU = {"iou": 15, "giou": 26, "diou": 37, "ciou": 55}
IOU_GRADIENT = {"iou": 32, "giou": 59, "diou": 71, "ciou": 94}
CORNERS = {True: 12, False: 6}  # by xywh
FOLD = {True: 16, False: 8}
SIGMOID = 3
BOX_DECODE = 12  # of four sigmoids: center and sides in pixels
ACTIVATION = {"silu": SIGMOID + 1, "relu": 1, "leaky_relu": 2, "hardswish": 5, "identity": 0}
ENTROPY = 16  # value and gradient of one logit, and its part of the sum
SOFTPLUS = 5  # entropy of a class that is not to be found, and its part of the sum
UPSAMPLE_BACKWARD = 3  # of one element: the sum of four gradients
EMA = 3
UNSCALE = 2  # a multiplication and the check that the result is finite
NORM, CLIP = 2, 3
SCALE_BOX = {True: 6, False: 16}  # by xywh: a box in the original image's pixels; corners are clipped too


def iou(pairs: int, kind: str = "ciou", xywh: bool = True) -> int:
    return pairs * (CORNERS[xywh] + IOU[kind])


def iou_backward(pairs: int, kind: str = "ciou", xywh: bool = True) -> int:
    """Return gradients by both boxes; the terms of the value are computed again."""
    return pairs * (CORNERS[xywh] + IOU[kind] + IOU_GRADIENT[kind] + FOLD[xywh])


def iou_loss(pairs: int, kind: str = "ciou", xywh: bool = True, reduced: bool = True) -> int:
    return iou(pairs, kind, xywh) + pairs * (2 if reduced else 1)


def max_pools(pooled: int, kernel_size: int = 5) -> int:
    """Count a comparison for each value of a window, and backward for each place. What is added up there depends on the values."""
    return pooled * kernel_size**2


def deformable_attention(points: int, channels: int) -> int:
    """Return the place and shares of four pixels (16), and their channels, each weighted and added."""
    return points * (16 + 4 * (1 + 2 * channels))


def deformable_attention_backward(points: int, channels: int) -> int:
    """Return products with four pixels, the gradients of place and weight (24), and four shares of the gradient, added up."""
    return points * (16 + 4 * 2 * channels + 24 + 4 * (1 + 2 * channels))


def decode(anchors: int, outputs: int) -> int:
    """Return YOLOv5's decode: ``outputs`` values an anchor, box, objectness and classes."""
    return anchors * (SIGMOID * outputs + BOX_DECODE)


def sgd(elements: int, weight_decay: bool = True, momentum: bool = True, nesterov: bool = True) -> int:
    return elements * (2 + 2 * weight_decay + (3 + 2 * nesterov if momentum else 0))


def instance_masks(masks: int, channels: int, low: int, pixels: int) -> int:
    """Return logits of ``low`` pixels of the prototypes, and ``pixels`` of the mask, each mixed of four and compared."""
    return masks * (low * 2 * channels + pixels * 9)


# The functions below take the arguments of an operator by name (`a.box1`), tensors replaced by their shapes.


def _pairs(a: SimpleNamespace) -> int:
    return math.prod(torch.broadcast_shapes(a.box1[:-1], a.box2[:-1]))


def _total(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _optional(shape: Shape | None) -> int:
    return 0 if shape is None else math.prod(shape)


def _anchors(a: SimpleNamespace) -> int:
    """Return anchors of YOLOv5 maps, (bs, na * no, ny, nx) or (bs, na, ny, nx, no), whose anchors have shape (nl, na, 2)."""
    return sum(h[0] * (math.prod(h[1:4]) if len(h) == 5 else a.anchors[1] * h[2] * h[3]) for h in a.heads)


def _bn_act(a: SimpleNamespace) -> int:
    """Return mean and variance (four an element), the norm (three), the activation, and the shortcut's sum."""
    elements = _total(a.x) if isinstance(a.x[0], Sequence) else math.prod(a.x)
    return elements * (4 + 3 + ACTIVATION[a.activation]) + _optional(a.residual)


def _stem_conv2d(a: SimpleNamespace) -> int:
    less = a.weight[2] == 2
    return 2 * a.squares[0] * (a.squares[2] - less) * (a.squares[3] - less) * math.prod(a.weight)


def _yolov5_decode(a: SimpleNamespace) -> int:
    count = _anchors(a)
    return decode(count, _total(a.heads) // count - a.nm) if count else 0


def _v8_class_logits(a: SimpleNamespace) -> int:
    """Count masks and keypoints for candidates only."""
    if len(a.heads[0]) == 3:  # boxes and scores of all levels
        return math.prod(a.heads[1])
    return sum(math.prod(head) // head[1] * (head[1] - 4 * a.reg_max) for head in a.heads)


def _rtdetr_logits(a: SimpleNamespace) -> int:
    """Count the varifocal entropy of each class as not to be found: no shape says how many queries get a target."""
    return math.prod(a.scores) + _optional(a.dn_scores)


def _sgd(a: SimpleNamespace) -> int:
    elements = _total(a.params)
    scaled = elements if a.grad_scale is not None else 0
    return sgd(elements, a.weight_decay != 0, bool(a.momentum_buffers), a.nesterov) + scaled


def _by_schema(name: str, formula: Callable[[SimpleNamespace], int]) -> Callable[..., int]:
    """Return the formula for register_flop_formula, which is called as the operator is, and with the shape of the result."""

    def count(*args: object, out_shape: object = None, **kwargs: object) -> int:
        arguments = operator_arguments(getattr(torch.ops.torch_fastdet, name).default)
        given = dict(zip([argument.name for argument in arguments], args), **kwargs)
        return formula(SimpleNamespace(**{each.name: given.get(each.name, each.default_value) for each in arguments}))

    return count


# These move values, and compute nothing.
_MOVES = ("image_gather_", "space_to_depth", "space_to_depth_backward", "upsample_nearest2x", "upsample_nearest2x_cat")
# What these compute depends on their tables, on how many anchors get a target, on the sizes of boxes, or on costs.
_NO_SHAPE_SAYS = (
    *("image_augment", "image_augment_", "image_letterbox", "image_letterbox_", "image_resize_"),
    *("jpeg_decode_", "jpeg_pack", "jpeg_plan", "linear_assignment"),
    *("v8_keypoint_loss", "v8_keypoint_loss_backward", "v8_mask_loss", "v8_mask_loss_backward", "yolov5_mask_loss"),
)

#: Operator -> formula, for every operator of the library.
FORMULAS: dict[str, Callable[..., int]] = {
    name: _by_schema(name, formula)
    for name, formula in {
        **dict.fromkeys((*_MOVES, *_NO_SHAPE_SAYS), lambda _: 0),
        "bbox_iou": lambda a: iou(
            _pairs(a), "ciou" if a.CIoU else "diou" if a.DIoU else "giou" if a.GIoU else "iou", a.xywh
        ),
        "iou_loss": lambda a: iou_loss(_pairs(a), a.kind, a.xywh, a.reduction != "none"),
        **dict.fromkeys(("bbox_iou_backward", "iou_loss_backward"), lambda a: iou_backward(_pairs(a), a.kind, a.xywh)),
        # The bias, or the norm (three), the activation, and the shortcut's sum.
        "bias_act": lambda a: (
            math.prod(a.x) * (1 + 2 * (a.variance is not None) + ACTIVATION[a.activation] + (a.residual is not None))
        ),
        **dict.fromkeys(("bn_act", "bn_act_cat", "bn_act_parts"), _bn_act),
        # The activation's input (3) and derivative (2 activations) twice, the sums (3) and the result (5) once.
        **dict.fromkeys(
            ("bn_act_backward", "bn_act_parts_backward"),
            lambda a: math.prod(a.x) * (2 * (3 + 2 * ACTIVATION[a.activation]) + 3 + 5),
        ),
        "pad_and_sum": lambda a: math.prod(a.x),
        "softmax_backward": lambda a: 4 * math.prod(a.y),
        "sum_rows": lambda a: math.prod(a.x),
        "sum_slices": lambda a: (len(a.x) - 1) * math.prod(a.out),
        "stem_conv2d": _stem_conv2d,
        "stem_conv2d_backward": lambda a: 2 * math.prod(a.grad_output) * a.squares[1] * a.kernel_size**2,
        "max_pool": lambda a: max_pools(
            a.x[0] * a.x[1] * (a.x[2] - a.kernel_size + 1) * (a.x[3] - a.kernel_size + 1), a.kernel_size
        ),
        "max_pool_backward": lambda a: max_pools(math.prod(a.indices), a.kernel_size),
        "max_pools_": lambda a: max_pools(math.prod(a.y) * a.pools // (a.pools + 1), a.kernel_size),
        "max_pools_cat": lambda a: max_pools(math.prod(a.x) * a.pools, a.kernel_size),
        "max_pools_cat_backward": lambda a: max_pools(math.prod(a.indices), a.kernel_size),
        "upsample_nearest2x_backward": lambda a: UPSAMPLE_BACKWARD * (math.prod(a.grad_output) // 4),
        "deformable_attention": lambda a: deformable_attention(math.prod(a.weights), a.value[3]),
        "deformable_attention_backward": lambda a: deformable_attention_backward(math.prod(a.weights), a.value[3]),
        "yolov5_decode": _yolov5_decode,
        "non_max_suppression_padded": lambda a: a.prediction[0] * a.prediction[1],  # objectness alone
        "ultralytics_non_max_suppression_padded": (
            lambda a: a.prediction[0] * (a.nc or max(a.prediction[1] - 4, 0)) * a.prediction[2]
        ),
        "yolov5_postprocess": _anchors,
        "ultralytics_postprocess": lambda a: _total(a.scores),
        "filter_detections": lambda a: math.prod(a.prediction[:-1]) * (1 if a.sizes is None else 11),
        "scale_boxes": lambda a: math.prod(a.boxes[:-1]) * SCALE_BOX[a.xywh],
        # The boxes are taken to cover the image; nothing is computed outside a box.
        "instance_masks": lambda a: instance_masks(
            math.prod(a.coefficients[:-1]), a.protos[-3], math.prod(a.protos[-2:]), math.prod(a.size)
        ),
        **dict.fromkeys(("crop_mask", "crop_mask_"), lambda a: math.prod(a.masks)),
        # The IoU of each label with each detection of its image, and a comparison.
        **dict.fromkeys(
            ("match_detections", "confusion_matrix_"),
            lambda a: a.detections[-2] * a.labels[0] * (IOU["iou"] + 1),
        ),
        "yolov5_loss": lambda a: ENTROPY * _anchors(a),  # objectness; boxes and classes are computed for matches only
        "yolov5_loss_backward": lambda a: math.prod(a.object_gradient),
        "rtdetr_loss": lambda a: (SIGMOID + SOFTPLUS + 5) * _rtdetr_logits(a),
        "rtdetr_loss_backward": lambda a: (SIGMOID + SOFTPLUS + 9) * _rtdetr_logits(a),
        **dict.fromkeys(("v8_loss", "v8_masked_loss", "v8_posed_loss"), lambda a: SOFTPLUS * _v8_class_logits(a)),
        "v8_loss_backward": lambda a: (SIGMOID + 1) * _v8_class_logits(a),
        "v8_obb_loss": lambda a: SOFTPLUS * math.prod(a.scores),
        "v8_obb_loss_backward": lambda a: (SIGMOID + 1) * math.prod(a.scores),
        "multi_tensor_ema_": lambda a: EMA * _total(a.averages),
        "multi_tensor_sgd_": _sgd,
        "multi_tensor_unscale_": lambda a: UNSCALE * _total(a.grads),
        "multi_tensor_norm": lambda a: NORM * _total(a.tensors),
        "multi_tensor_clip_grad_norm_": lambda a: CLIP * _total(a.grads),
    }.items()
}


def register() -> None:
    """Register the formulas with ``torch.utils.flop_counter``, as the import of this module does. A user's own formula stays."""
    for name, formula in FORMULAS.items():
        packet = getattr(torch.ops.torch_fastdet, name)
        if packet not in flop_registry:
            register_flop_formula(packet)(formula)


register()
