"""Outputs of a ``Detect`` as its convolutions write them, where the framework copies or transposes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet._torch.modules import put_attributes
from torch_fastdet.patching.evidence import Obstacle, agree, pictures, stand_ins
from torch_fastdet.rewrites.rewrite import (
    ULTRALYTICS_HEADS,
    YOLOV5,
    detect_of,
    obstacle_to_other_sums,
    obstacle_to_rows,
)


def raw_heads(detect: Any, x: list[Tensor]) -> list[Tensor]:
    """What YOLOv5's Detect returns in training, (bs, na, ny, nx, no) a level, as views of its convolutions' outputs, also in ``x``."""
    outputs = (convolution(features) for convolution, features in zip(detect.m, x))
    x[:] = [output.unflatten(1, (detect.na, detect.no)).movedim(2, -1) for output in outputs]
    return x


@functools.cache
def _obstacle_to_views(forward: Any) -> Obstacle | None:
    """Why this is not what YOLOv5's ``Detect.forward`` computes in training: forks change it under the same name."""
    attributes = {"nl": 2, "na": 2, "no": 3, "m": list(stand_ins("0", "1").values()), "training": True, "export": False}
    known = agree(forward, raw_heads, attributes, [pictures(6), -pictures(6)])
    return None if known else Obstacle("Detect.forward is not YOLOv5's.")


class HeadViews:
    """YOLOv5's Detect returns (bs, na, ny, nx, no) views of its convolutions' outputs, where the original copies them.

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


def _joined(head: Any, x: list[Tensor]) -> Tensor:
    """What ``head`` makes of each level, (N, channels, anchors of all levels), with the channels of an anchor side by side."""
    rows = [part(features).permute(0, 2, 3, 1).flatten(1, 2) for part, features in zip(head, x)]
    return torch.cat(rows, 1).transpose(1, 2)


def _outputs(detect: object, x: list[Tensor], box_head: object = None, cls_head: object = None) -> dict[str, Any]:
    """Boxes and scores of all anchors beside the features that they come from; nothing where a head is missing."""
    heads = {"boxes": box_head, "scores": cls_head}
    if any(head is None for head in heads.values()):
        return {}
    return {name: _joined(head, x) for name, head in heads.items()} | {"feats": x}


@functools.cache
def _obstacle_to_outputs(forward_head: object) -> Obstacle | None:
    """Why this is not what Ultralytics' ``Detect.forward_head`` computes: forks change it under the same name."""
    boxes = [lambda t: t + 1, lambda t: t * t]
    classes = [lambda t: t[:, :3] + 2, lambda t: t[:, 1:] * t[:, :3]]

    def whole(method: Any) -> Any:
        return lambda self, x: [method(self, x, boxes, classes), method(self, x, boxes), method(self, x)]

    attributes: dict[str, object] = {"nl": 2, "reg_max": 1, "nc": 3}
    known = agree(whole(forward_head), whole(_outputs), attributes, [pictures(4), -pictures(4)])
    return None if known else Obstacle("Detect.forward_head is not Ultralytics'.")


class HeadRows:
    """The boxes and scores of Ultralytics' Detect have the channels of an anchor side by side, as its convolutions write them."""

    about = "Ultralytics' Detect writes the channels of an anchor side by side"

    def matches(self, model: nn.Module) -> Obstacle | None:
        if (obstacle := obstacle_to_other_sums(model) or obstacle_to_rows(model)) is not None:
            return obstacle
        detect = detect_of(model, "forward_head", ULTRALYTICS_HEADS)
        if detect is None:
            return Obstacle("it does not end in Ultralytics' Detect, in training.")
        return _obstacle_to_outputs(getattr(type(detect), "forward_head", None))

    def apply(self, model: nn.Module) -> Callable[[], None]:
        detect = detect_of(model, "forward_head", ULTRALYTICS_HEADS)
        return put_attributes([(detect, "forward_head", functools.partial(_outputs, detect))])
