"""Runs the first convolutions of the branches of a head's level as one (:mod:`torch_fastdet.nn.joint`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from torch_fastdet._torch.modules import put_attributes
from torch_fastdet._torch.private import runs_plainly
from torch_fastdet.nn.bn_act import blocks_of_one_input
from torch_fastdet.nn.joint import OF_ONE_INPUT
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.rewrites.rewrite import ULTRALYTICS_HEADS, head_of, obstacle_to_other_sums

_SEQUENTIAL = nn.Sequential.forward


class _Level:
    """Join the branches of a head that read the same features. The first that is called runs the first blocks of all as one convolution."""

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


class FirstBlocks:
    """Let boxes and classes of YOLOv8, and boxes and masks, or angles, of all, begin with one convolution."""

    about = "first convolutions of a level's branches are one"

    def matches(self, model: nn.Module) -> Obstacle | None:
        if (obstacle := obstacle_to_other_sums(model)) is not None:
            return obstacle
        has_levels = any(_levels(head_of(model, ULTRALYTICS_HEADS)))
        return None if has_levels else Obstacle("its head has no branches that read the same features.")

    def apply(self, model: nn.Module) -> Callable[[], None]:
        head = head_of(model, ULTRALYTICS_HEADS)
        levels = list(_levels(head))
        return put_attributes(
            [
                (head, OF_ONE_INPUT, [level.blocks for level in levels]),
                *((b, "forward", functools.partial(level.forward, b)) for level in levels for b in level.branches),
            ]
        )
