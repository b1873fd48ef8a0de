"""YOLOv5's model in a captured step: without the copy of its outputs, and with fewer copies in its neck."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torch_fastdet.hosts.evidence import agree, pictures, stand_ins
from torch_fastdet.hosts.shared.necks import joined_upsampling

STOCK_MODULES = ("models.yolo", "yolov5.models.yolo")


def _forward(detect: Any, x: list[torch.Tensor]) -> list[torch.Tensor]:
    for i, convolution in enumerate(detect.m):
        y = convolution(x[i])
        batch, _, ny, nx = y.shape
        x[i] = y.view(batch, detect.na, detect.no, ny, nx).permute(0, 1, 3, 4, 2)
    return x


@functools.cache
def _is_stocks(forward: Any) -> bool:
    """Whether this is what stock's ``Detect.forward`` computes in training: forks change it under the same name."""
    attributes = {"nl": 2, "na": 2, "no": 3, "m": list(stand_ins("0", "1").values()), "training": True, "export": False}
    return agree(forward, _forward, attributes, [pictures(6), -pictures(6)])


@contextlib.contextmanager
def head_views(model: nn.Module) -> Iterator[None]:
    """While inside, YOLOv5's Detect returns its convolutions' outputs as (bs, na, ny, nx, no) views, where stock copies them.

    Losses index heads by these five dimensions, whatever their strides; ComputeLoss writes its gradients in the same
    layout, so that neither the outputs nor their gradients are copied. Models without stock's Detect at their end are left alone,
    as is a model in eval mode.
    """
    layers = getattr(model, "model", None)
    detect: Any = layers[-1] if isinstance(layers, nn.Sequential) and len(layers) else None
    plain = (
        detect is not None
        and model.training
        and type(detect).__name__ == "Detect"
        and type(detect).__module__ in STOCK_MODULES
        and "forward" not in vars(detect)
        and _is_stocks(type(detect).forward)
    )
    if not plain:
        yield
        return
    detect.forward = lambda x: _forward(detect, x)
    try:
        yield
    finally:
        del detect.forward


@contextlib.contextmanager
def fewer_copies(model: nn.Module) -> Iterator[None]:
    """While inside, the model's values are stock's with fewer copies: :func:`head_views` and :func:`joined_upsampling`."""
    with head_views(model), joined_upsampling(model, "_forward_once", STOCK_MODULES):
        yield
