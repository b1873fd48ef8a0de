"""NHWC memory for a model in training, and contiguous copies of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def to_channels_last(model: nn.Module) -> bool:
    """Give the 4-D parameters NHWC memory, in place; False if they have it already."""
    changed = False
    for parameter in model.parameters():
        if parameter.dim() == 4 and not parameter.is_contiguous(memory_format=torch.channels_last):
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
            changed = True
    return changed


def plain_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy`` of a model, with contiguous parameters.

    YOLOv5 and Ultralytics average, validate and save copies, never the model itself. Stock's ``fuse()`` calls ``.view`` on the
    weights of a checkpoint, which fails on NHWC memory.
    """
    result = model.__class__.__new__(model.__class__)
    memo[id(model)] = result
    result.__dict__.update(copy.deepcopy(model.__dict__, memo))
    for parameter in result.parameters():
        parameter.data = parameter.data.contiguous()
    return result
