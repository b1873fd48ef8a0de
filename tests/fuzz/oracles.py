"""What an operator should give, from the references of tests/references, which know nothing of memory, layouts and devices."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.references import (
    bbox_iou,
    bn_act,
    masks,
    metrics,
    multi_tensor,
    nms,
    pool,
    space_to_depth,
    stem_conv,
    upsample,
    yolov5_loss,
)

#: Numbers beyond overflow on the way in an operator's own type, where float64 does not.
LARGEST = 1e4


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _levels(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Bytes that become numbers between 0 and 1."""
    scaled = x.dtype == torch.uint8 and dtype is not None and dtype.is_floating_point
    return x / 255.0 if scaled else x


def _iou_loss(a: Any) -> list[Tensor]:
    return [bbox_iou.iou_loss(_double(a.box1), _double(a.box2), a.kind, a.xywh, a.reduction, a.eps)]


def _bbox_iou(a: Any) -> list[Tensor]:
    return [bbox_iou.bbox_iou(_double(a.box1), _double(a.box2), a.xywh, a.GIoU, a.DIoU, a.CIoU, a.eps)]


def _bn_act(a: Any) -> list[Tensor]:
    found = bn_act.bn_act(a.x, a.weight, a.bias, torch.zeros_like(a.x), a.eps, a.activation, a.slope, a.residual)
    return [found.y, found.mean] if a.x.numel() else [found.y]  # without elements there is no mean


def _matches(a: Any) -> list[Tensor]:
    assert a.counts is None and a.detections.dim() == 2
    overlaps = None if a.iou is None else a.iou.float().numpy()
    return [torch.from_numpy(metrics.match(a.detections, a.labels, a.iouv, a.rule, overlaps))]


def _sgd(a: Any) -> list[Tensor]:
    assert a.grad_scale is None and a.found_inf is None
    buffers = [None if a.is_first_step else buffer for buffer in a.momentum_buffers] or [None] * len(a.params)
    return [
        multi_tensor.sgd(param, grad, buffer, float(a.lr), float(a.momentum), a.dampening, a.weight_decay, a.nesterov, a.maximize)[0]
        for param, grad, buffer in zip(a.params, a.grads, buffers, strict=True)
    ]  # fmt: skip


def _yolov5_loss(a: Any) -> list[Tensor]:
    assert a.num_targets is None and a.heads[0].dim() == 5
    same = ("cls_pw", "obj_pw", "label_smoothing", "fl_gamma", "anchor_t", "gr", "sort_obj_iou")
    gains = {"box": a.box_gain, "obj": a.obj_gain, "cls": a.cls_gain, **{name: getattr(a, name) for name in same}}
    return list(yolov5_loss.yolov5_loss(a.heads, a.targets, a.anchors, a.balance, **gains)[:2])


#: Of the first results, or of what is written where nothing is returned.
ORACLES: dict[str, Callable[[Any], list[Tensor]]] = {
    "bbox_iou": _bbox_iou,
    "iou_loss": _iou_loss,
    "bn_act": _bn_act,
    "crop_mask": lambda a: [masks.crop(a.masks.double(), a.boxes.double(), 0.0)],
    "crop_mask_": lambda a: [masks.crop(a.masks.double(), a.boxes.double(), 0.0)],
    "match_detections": _matches,
    "max_pools_cat": lambda a: [pool.max_pools_cat(a.x, a.kernel_size, a.pools)[0]],
    "multi_tensor_clip_grad_norm_": lambda a: [torch.tensor(multi_tensor.norm(a.grads))],
    "multi_tensor_ema_": lambda a: [multi_tensor.ema(x, y, float(a.decay)) for x, y in zip(a.averages, a.values, strict=True)],
    "multi_tensor_norm": lambda a: [torch.tensor(multi_tensor.norm(a.tensors))],
    "multi_tensor_sgd_": _sgd,
    "multi_tensor_unscale_": lambda a: [grad.double() / float(a.scale) for grad in a.grads],
    "pad_and_sum": lambda a: [torch.cat([a.x.double(), a.x.new_zeros(len(a.x), a.channels - a.x.shape[1], *a.x.shape[2:])], 1)],
    "softmax_backward": lambda a: [
        a.y.double() * (a.grad_y.double() - (a.grad_y.double() * a.y.double()).sum(-1, keepdim=True))
    ],
    "space_to_depth": lambda a: [space_to_depth.space_to_depth(_levels(a.x, a.dtype), a.channels, a.border)],
    "space_to_depth_backward": lambda a: [space_to_depth.space_to_depth_backward(a.grad_output, a.channels, a.border)],
    "stem_conv2d": lambda a: [stem_conv.stem_conv2d(a.squares, a.weight)],
    "stem_conv2d_backward": lambda a: [stem_conv.stem_conv2d_backward(a.grad_output, a.squares, a.kernel_size)],
    "sum_slices": lambda a: [sum(x.double() for x in a.x)],
    "upsample_nearest2x": lambda a: [upsample.upsample_nearest2x(a.x)],
    "upsample_nearest2x_backward": lambda a: [upsample.upsample_nearest2x_backward(a.grad_output)],
    "upsample_nearest2x_cat": lambda a: [upsample.upsample_nearest2x_cat(a.x, a.skip)],
    "yolov5_decode": lambda a: [nms.decode(a.heads, a.anchors, a.strides, a.nm)],
    "yolov5_loss": _yolov5_loss,
}  # fmt: skip


def _is_tame(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.numel() or bool((value.double().abs() <= LARGEST).all())  # NaN is not
    return not isinstance(value, (int, float)) or abs(value) <= (1 << 16 if isinstance(value, int) else LARGEST)


def expected(operator: Any, args: tuple, kwargs: dict) -> list[Tensor] | None:
    """What the operator's oracle says of these arguments; None where there is none, and where the numbers or shapes are not its."""
    oracle = ORACLES.get(operator.name().partition("::")[2].partition(".")[0])
    if oracle is None or not all(map(_is_tame, tree_leaves((args, kwargs)))):
        return None
    args, kwargs = tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, (args, kwargs))
    schema = operator._schema.arguments
    named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    named |= {argument.name: value for argument, value in zip(schema, args)} | kwargs
    try:
        return oracle(SimpleNamespace(**named))
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError, KeyError):
        return None


def given(operator: Any, args: tuple, kwargs: dict, results: Any) -> list[Tensor]:
    """What the operator gave, in the order of the oracle's: its results, or the tensors that it wrote."""
    found = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
    if found:
        return found
    named = zip(operator._schema.arguments, args)
    return tree_leaves([value for argument, value in named if argument.alias_info is not None])
