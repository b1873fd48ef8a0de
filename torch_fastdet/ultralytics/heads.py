"""Ultralytics' Detect in a captured step: its outputs without transposing them, and two convolutions of one input as one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet._torch.modules import is_channels_last, own_attributes
from torch_fastdet._torch.private import every_module_has_hooks
from torch_fastdet.hosts.evidence import agree, pictures
from torch_fastdet.hosts.shared.necks import stock_detect
from torch_fastdet.layers.bn_act import first_blocks
from torch_fastdet.layers.joint import OF_ONE_INPUT

MODULE = "ultralytics.nn.modules.head"


def _of_level(box: Any, cls: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes and scores of one level, whose first blocks are one convolution where a captured step has joined them."""
    first = first_blocks([box, cls], x)
    if first is None:
        return box(x), cls(x)
    boxes, scores = first
    for layer in list(box)[1:]:
        boxes = layer(boxes)
    for layer in list(cls)[1:]:
        scores = layer(scores)
    return boxes, scores


def _joined(levels: Iterable[Tensor]) -> Tensor:
    """All levels together, (N, channels, anchors), with the channels of an anchor side by side."""
    return torch.cat([level.permute(0, 2, 3, 1).flatten(1, 2) for level in levels], 1).transpose(1, 2)


def _outputs(detect: object, x: list[Tensor], box_head: Any = None, cls_head: Any = None) -> dict[str, Any]:
    if box_head is None or cls_head is None:  # fused for inference
        return {}
    boxes, scores = zip(*map(_of_level, box_head, cls_head, x))
    return {"boxes": _joined(boxes), "scores": _joined(scores), "feats": x}


def _first_blocks(detect: Any) -> list[list[nn.Module]]:
    """Those for boxes and classes, for each level: they read the same features."""
    levels = zip(detect.cv2 or (), detect.cv3 or ())
    return [[next(branch.children(), branch) for branch in level] for level in levels]


@functools.cache
def _is_stocks(forward_head: object) -> bool:
    """Whether this is what stock's ``Detect.forward_head`` computes: forks change it under the same name."""
    boxes = [lambda t: t + 1, lambda t: t * t]
    classes = [lambda t: t[:, :3] + 2, lambda t: t[:, 1:] * t[:, :3]]

    def whole(method: Any) -> Any:
        return lambda self, x: [method(self, x, boxes, classes), method(self, x, boxes), method(self, x)]

    attributes: dict[str, object] = {"nl": 2, "reg_max": 1, "nc": 3}
    return agree(whole(forward_head), whole(_outputs), attributes, [pictures(4), -pictures(4)])


@contextlib.contextmanager
def heads_in_rows(model: nn.Module) -> Iterator[None]:
    """While inside, the boxes and scores of a channels_last model's Detect have the channels of an anchor side by side in memory.

    That is how its convolutions write them. Stock writes them one channel after the other. Losses index them by three
    dimensions, whatever their strides. The first convolutions of boxes and classes become one where they can be
    (:mod:`torch_fastdet.layers.joint`).
    """
    detect = stock_detect(model, "forward_head", (MODULE,))
    known = (
        detect is not None
        and not every_module_has_hooks()
        and any(map(is_channels_last, model.parameters()))
        and _is_stocks(getattr(type(detect), "forward_head", None))
    )
    if not known:
        yield
        return
    groups = _first_blocks(detect)
    OF_ONE_INPUT.extend(groups)
    try:
        with own_attributes([(detect, "forward_head", functools.partial(_outputs, detect))]):
            yield
    finally:
        for group in groups:
            OF_ONE_INPUT.remove(group)
