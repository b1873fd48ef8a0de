"""Upsamples straight into the concatenation behind it, and lets the stem divide uint8 images by 255."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn

from torch_fastdet import ops
from torch_fastdet._torch.private import runs_plainly
from torch_fastdet.nn.forwards import begins_with_stem, forward_of_bytes
from torch_fastdet.patching.evidence import agree, make_images
from torch_fastdet.patching.protocols import Function, Model
from torch_fastdet.rewrites.rewrite import FRAMEWORKS, Changes, Framework, Rewrite, layers_of
from torch_fastdet.switches.upsample.switch import doubles, upsample_forward

_MARK = "torch_fastdet_takes_bytes"


def _cat(concat: Model, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, concat.d)


@functools.cache
def _concatenates(forward: Function) -> bool:
    return agree(forward, _cat, {"d": 1}, [make_images(), -make_images()])


def _is_pair(upsample: nn.Module, concat: Model, save: Collection[object]) -> bool:
    """Return whether ``concat`` alone reads what ``upsample`` makes, and puts one other tensor behind it along the channels."""
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


def _joined(upsample: Model, concat: object) -> Callable[[list[Tensor]], Tensor]:
    def forward(parts: list[Tensor]) -> Tensor:
        x, skip = parts
        if doubles(upsample, x) and type(skip) is Tensor and skip.dtype == x.dtype and skip.device == x.device:
            return ops.upsample_nearest2x_cat(x, skip)
        return _cat(concat, [upsample_forward(upsample, x), skip])

    return forward


@functools.partial(Rewrite, "upsamplings write into the concatenations behind them", ())
def upsample_concat(model: Model, frameworks: Iterable[Framework] = FRAMEWORKS) -> Changes:
    """Join each upsampling of ``upsample_optim`` with the concatenation that alone reads its result.

    A layer reads the results that its attribute ``f`` names; ``model.save`` has the numbers of those that later layers read.
    """
    layers, save = layers_of(model, frameworks, loop_alone=True), getattr(model, "save", None)
    for upsample, concat in itertools.pairwise(layers):
        if isinstance(save, (list, tuple, set)) and _is_pair(upsample, concat, save):
            yield upsample, "forward", lambda x: x
            yield concat, "forward", _joined(upsample, concat)


def takes_bytes(model: nn.Module) -> bool:
    """Return whether the model takes uint8 images now, for which its result is that of ``images / 255``."""
    return _MARK in vars(model)


@functools.partial(Rewrite, "the stem reads uint8 images and divides them by 255", ())
def stem_of_bytes(model: Model, frameworks: Iterable[Framework] = FRAMEWORKS) -> Changes:
    """Let the model take uint8 images too (:func:`takes_bytes`). Its first layer, a stem of ``bn_act_optim``, alone reads the images."""
    first = next(iter(layers_of(model, frameworks)), None)
    if first is not None and getattr(first, "f", None) == -1 and begins_with_stem(first):
        yield first, "forward", functools.partial(forward_of_bytes, first)
        yield model, _MARK, True
