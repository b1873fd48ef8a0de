"""NHWC memory for a model in training, and contiguous copies of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_fastdet.patching.replace import in_place_of


def to_channels_last(model: nn.Module) -> None:
    """Give the 4-D parameters NHWC memory, in place."""
    for parameter in model.parameters():
        if parameter.dim() == 4 and not parameter.is_contiguous(memory_format=torch.channels_last):
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _make_contiguous(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def plain_copy(model: nn.Module, memo: dict[int, object]) -> nn.Module:
    """``copy.deepcopy`` of a model, with contiguous parameters.

    YOLOv5 and Ultralytics average, validate and save copies, never the model itself. Stock's ``fuse()`` calls ``.view`` on the
    weights of a checkpoint, which fails on NHWC memory.
    """
    reduced: Any = model.__reduce_ex__(4)  # as copy.deepcopy, so that a class may leave something out
    make, arguments, *state = reduced
    result = memo[id(model)] = make(*copy.deepcopy(arguments, memo))
    if state and state[0] is not None:
        result.__setstate__(copy.deepcopy(state[0], memo))
    _make_contiguous(result)
    return result


def plain_fuse(stock: Callable[..., object]) -> Callable[..., object]:
    """Stands for ``fuse()`` of a model: its parameters are made contiguous first, because stock's calls ``.view`` on them."""

    @in_place_of(stock, "channels_last.fuse")
    def fuse(model: nn.Module, *args: object, **kwargs: object) -> object:
        _make_contiguous(model)
        return stock(model, *args, **kwargs)

    return fuse
