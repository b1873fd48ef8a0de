"""Returns the outputs of a ``Detect`` as its convolutions write them, where the framework copies or transposes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from torch_fastdet._torch.modules import put_attributes
from torch_fastdet._torch.private import runs_plainly
from torch_fastdet.nn.bn_act import convolved
from torch_fastdet.patching.evidence import Obstacle, agree, pictures, stand_ins
from torch_fastdet.patching.protocols import Head, Names
from torch_fastdet.rewrites.rewrite import (
    ULTRALYTICS_HEADS,
    YOLOV5,
    detect_of,
    obstacle_to_other_sums,
    obstacle_to_rows,
)


def raw_heads(detect: Head, x: list[Tensor]) -> list[Tensor]:
    """Return what YOLOv5's Detect returns in training, (bs, na, ny, nx, no) a level, as views of its convolutions' outputs, also in ``x``."""
    outputs = (convolution(features) for convolution, features in zip(detect.m, x))
    x[:] = [output.unflatten(1, (detect.na, detect.no)).movedim(2, -1) for output in outputs]
    return x


@functools.cache
def _obstacle_to_views(forward: Any) -> Obstacle | None:
    """Return why this is not what YOLOv5's ``Detect.forward`` computes in training: forks change it under the same name."""
    attributes = {"nl": 2, "na": 2, "no": 3, "m": list(stand_ins("0", "1").values()), "training": True, "export": False}
    known = agree(forward, raw_heads, attributes, [pictures(6), -pictures(6)])
    return None if known else Obstacle("Detect.forward is not YOLOv5's.")


class HeadViews:
    """Let YOLOv5's Detect return (bs, na, ny, nx, no) views of its convolutions' outputs, where the original copies them.

    ComputeLoss writes its gradients in the same layout, so that these are not copied either.
    """

    about = "YOLOv5's Detect returns views of its convolutions' outputs"

    def matches(self, model: nn.Module) -> Obstacle | None:
        detect = detect_of(model, "forward", YOLOV5)
        if detect is None:
            return Obstacle("it does not end in YOLOv5's Detect, in training.")
        return _obstacle_to_views(type(detect).forward)

    def apply(self, model: nn.Module) -> Callable[[], None]:
        detect = detect_of(model, "forward", YOLOV5)
        return put_attributes([(detect, "forward", functools.partial(raw_heads, detect))])


def _joined(head: Head, x: list[Tensor]) -> Tensor:
    """Return what ``head`` makes of each level, (N, channels, anchors of all levels), with the channels of an anchor side by side."""
    rows = [part(features).permute(0, 2, 3, 1).flatten(1, 2) for part, features in zip(head, x)]
    return torch.cat(rows, 1).transpose(1, 2)


def _written(head: Head, x: list[Tensor]) -> Tensor:
    """Return :func:`_joined` without a gradient: the last convolutions' bias is added on the way into the rows."""
    parts = [convolved(part, features) for part, features in zip(head, x)]
    first, positions = parts[0][0], [y.shape[2] * y.shape[3] for y, _ in parts]
    rows = first.new_empty(len(first), sum(positions), first.shape[1])
    for (y, bias), place in zip(parts, rows.split(positions, 1)):
        image = place.unflatten(1, y.shape[2:]).permute(0, 3, 1, 2)
        if y.is_contiguous(memory_format=torch.channels_last):
            torch.ops.torch_fastdet.bias_act(y, image, None, bias, activation="identity")
        else:
            image.copy_(y if bias is None else y + bias[:, None, None])
    return rows.transpose(1, 2)


def _distances(dfl: Head, x: Tensor) -> Tensor:
    """Return Ultralytics' DFL for x whose channels of an anchor lie side by side."""
    shares = x.transpose(1, 2).unflatten(2, (4, dfl.c1)).softmax(-1)
    return (shares @ dfl.conv.weight.flatten()).transpose(1, 2)


@functools.cache
def _is_dfl(forward: object) -> bool:
    bins = nn.Conv2d(2, 1, 1, bias=False).double().requires_grad_(False)
    bins.weight.data[:] = torch.arange(2).view(1, 2, 1, 1)
    return agree(cast(Any, forward), _distances, {"conv": bins, "c1": 2}, pictures(8).flatten(2))


def _outputs(detect: object, x: list[Tensor], box_head: object = None, cls_head: object = None) -> Names:
    """Return boxes and scores of all anchors beside the features that they come from; nothing where a head is missing."""
    heads = {"boxes": box_head, "scores": cls_head}
    if any(head is None for head in heads.values()):
        return {}
    joined = _joined if torch.is_grad_enabled() else _written
    return {name: joined(head, x) for name, head in heads.items()} | {"feats": x}


@functools.cache
def _obstacle_to_outputs(forward_head: object) -> Obstacle | None:
    """Return why this is not what Ultralytics' ``Detect.forward_head`` computes: forks change it under the same name."""
    boxes = [lambda t: t + 1, lambda t: t * t]
    classes = [lambda t: t[:, :3] + 2, lambda t: t[:, 1:] * t[:, :3]]

    def whole(method: Any) -> Any:
        return lambda self, x: [method(self, x, boxes, classes), method(self, x, boxes), method(self, x)]

    attributes: dict[str, object] = {"nl": 2, "reg_max": 1, "nc": 3}
    known = agree(whole(forward_head), whole(_outputs), attributes, [pictures(4), -pictures(4)])
    return None if known else Obstacle("Detect.forward_head is not Ultralytics'.")


class HeadRows:
    """Let the boxes and scores of Ultralytics' Detect have the channels of an anchor side by side, as its convolutions write them.

    In evaluation the distances of boxes are made from them as they lie.
    """

    about = "Ultralytics' Detect writes the channels of an anchor side by side"

    def matches(self, model: nn.Module) -> Obstacle | None:
        if (obstacle := obstacle_to_other_sums(model) or obstacle_to_rows(model)) is not None:
            return obstacle
        detect = detect_of(model, "forward_head", ULTRALYTICS_HEADS, evaluated=True)
        if detect is None:
            return Obstacle("it does not end in Ultralytics' Detect.")
        return _obstacle_to_outputs(getattr(type(detect), "forward_head", None))

    def apply(self, model: nn.Module) -> Callable[[], None]:
        detect = detect_of(model, "forward_head", ULTRALYTICS_HEADS, evaluated=True)
        methods: list[tuple[object, str, object]] = [(detect, "forward_head", functools.partial(_outputs, detect))]
        dfl, forward = detect.dfl, type(detect.dfl).forward
        if not model.training and runs_plainly(dfl, forward) and _is_dfl(forward):
            methods.append((dfl, "forward", functools.partial(_distances, dfl)))
        return put_attributes(methods)
