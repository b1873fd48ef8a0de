"""Ultralytics' Detect in a captured step: its outputs without transposing them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet._torch.modules import is_channels_last, own_attributes
from torch_fastdet._torch.private import every_module_has_hooks
from torch_fastdet.hosts.evidence import agree, pictures
from torch_fastdet.hosts.shared.necks import stock_detect

MODULE = "ultralytics.nn.modules.head"


def _joined(head: Any, x: list[Tensor]) -> Tensor:
    """What ``head`` makes of each level, (N, channels, anchors of all levels), with the channels of an anchor side by side."""
    rows = [part(features).permute(0, 2, 3, 1).flatten(1, 2) for part, features in zip(head, x)]
    return torch.cat(rows, 1).transpose(1, 2)


def _outputs(detect: object, x: list[Tensor], box_head: object = None, cls_head: object = None) -> dict[str, Any]:
    if box_head is None or cls_head is None:  # fused for inference
        return {}
    return {"boxes": _joined(box_head, x), "scores": _joined(cls_head, x), "feats": x}


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
    dimensions, whatever their strides.
    """
    detect = stock_detect(model, "forward_head", (MODULE,))
    known = (
        detect is not None
        and not every_module_has_hooks()
        and any(map(is_channels_last, model.parameters()))
        and _is_stocks(getattr(type(detect), "forward_head", None))
    )
    with own_attributes([(detect, "forward_head", functools.partial(_outputs, detect))] if known else []):
        yield
