"""An upsampling that writes straight into the concatenation behind it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet import ops
from torch_fastdet._torch.modules import put_attributes
from torch_fastdet._torch.private import runs_plainly
from torch_fastdet.patching.evidence import Obstacle, agree, pictures
from torch_fastdet.rewrites.rewrite import Framework, layers_of
from torch_fastdet.switches.upsample.switch import doubles, upsample_forward


def _cat(concat: Any, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, concat.d)


@functools.cache
def _concatenates(forward: Any) -> bool:
    return agree(forward, _cat, {"d": 1}, [pictures(), -pictures()])


def _is_pair(upsample: nn.Module, concat: Any, save: Collection[object]) -> bool:
    """Whether ``concat`` alone reads what ``upsample`` makes, and puts one other tensor behind it along the channels."""
    return (
        type(upsample) is nn.Upsample
        and runs_plainly(upsample, upsample_forward)  # the switch is on
        and getattr(upsample, "f", None) == -1
        and getattr(upsample, "i", None) not in save
        and _concatenates(type(concat).forward)
        and runs_plainly(concat, type(concat).forward)
        and concat.d == 1
        and isinstance(getattr(concat, "f", None), list)
        and len(concat.f) == 2
        and concat.f[0] == -1
        and concat.f[1] != -1
    )


def _joined(upsample: Any, concat: object) -> Callable[[list[Tensor]], Tensor]:
    def forward(parts: list[Tensor]) -> Tensor:
        x, skip = parts
        if doubles(upsample, x) and type(skip) is Tensor and skip.dtype == x.dtype and skip.device == x.device:
            return ops.upsample_nearest2x_cat(x, skip)
        return _cat(concat, [upsample_forward(upsample, x), skip])

    return forward


class UpsampleConcat:
    """Each upsampling of ``upsample_optim`` whose result only a concatenation reads becomes one operator with it.

    A layer reads the results that its attribute ``f`` names; ``model.save`` has the numbers of those that later layers read.
    """

    about = "upsamplings write into the concatenations behind them"

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def _pairs(self, model: object) -> list[tuple[nn.Module, nn.Module]]:
        layers, save = layers_of(model, self._framework, loop_alone=True), getattr(model, "save", None)
        if not isinstance(save, (list, tuple, set)):
            return []
        return [(up, cat) for up, cat in itertools.pairwise(layers) if _is_pair(up, cat, save)]

    def matches(self, model: object) -> Obstacle | None:
        return None if self._pairs(model) else Obstacle("no concatenation alone reads an upsampling of upsample_optim.")

    def apply(self, model: object) -> Callable[[], None]:
        pairs = self._pairs(model)
        return put_attributes(
            [(up, "forward", lambda x: x) for up, _ in pairs]
            + [(cat, "forward", _joined(up, cat)) for up, cat in pairs]
        )
