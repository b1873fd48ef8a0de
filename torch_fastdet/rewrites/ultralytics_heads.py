"""Ultralytics' heads in a captured step: Detect's outputs without transposing them, and first convolutions of one input as one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet._torch.modules import is_channels_last, own_attributes
from torch_fastdet._torch.private import every_module_has_hooks, runs_plainly
from torch_fastdet.nn.bn_act import blocks_of_one_input
from torch_fastdet.nn.joint import OF_ONE_INPUT
from torch_fastdet.patching.evidence import agree, pictures
from torch_fastdet.rewrites.necks import stock_detect, stock_head

MODULE = "ultralytics.nn.modules.head"
_SEQUENTIAL = nn.Sequential.forward


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


class _Level:
    """Branches of a head that read the same features. Whichever is called first runs the first blocks of all that are alike as one
    convolution."""

    def __init__(self, branches: list[nn.Sequential]) -> None:
        self.branches = branches
        self.blocks = [branch[0] for branch in branches]
        self._made: dict[nn.Module, Tensor] = {}
        self._of: Tensor | None = None

    def forward(self, branch: nn.Sequential, x: Tensor) -> Tensor:
        if self._of is not x:
            self._of, self._made = x, blocks_of_one_input(self.blocks, x)
        y = self._made.pop(branch[0], None)
        if y is None:
            return _SEQUENTIAL(branch, x)
        for layer in list(branch)[1:]:
            y = layer(y)
        return y


def _levels(head: object) -> Iterator[_Level]:
    for prefix in ("", "one2one_"):
        branches = [getattr(head, f"{prefix}{name}", None) for name in ("cv2", "cv3", "cv4")]
        for level in zip(*(b for b in branches if isinstance(b, nn.ModuleList))):
            plain = [b for b in level if type(b) is nn.Sequential and len(b) and runs_plainly(b, _SEQUENTIAL)]
            if len(plain) > 1:
                yield _Level(plain)


@contextlib.contextmanager
def first_blocks_at_once(model: nn.Module) -> Iterator[None]:
    """While inside, first convolutions of the branches of a level become one (:mod:`torch_fastdet.nn.joint`): boxes and classes of
    YOLOv8; boxes and masks, or angles, of all.
    """
    head = None if every_module_has_hooks() else stock_head(model, (MODULE,))
    levels = list(_levels(head))
    OF_ONE_INPUT.extend(level.blocks for level in levels)
    try:
        with own_attributes(
            [(b, "forward", functools.partial(level.forward, b)) for level in levels for b in level.branches]
        ):
            yield
    finally:
        for level in levels:
            OF_ONE_INPUT.remove(level.blocks)
