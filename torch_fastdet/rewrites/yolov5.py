"""YOLOv5's model in a captured step: without the copy of its outputs, and with fewer copies in its neck."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torch_fastdet._torch.modules import own_attributes
from torch_fastdet.patching.evidence import agree, pictures, stand_ins
from torch_fastdet.rewrites.necks import images_of_bytes, joined_upsampling, stock_detect

STOCK_MODULES = ("models.yolo", "yolov5.models.yolo")


def raw_heads(detect: Any, x: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a Detect returns in training, (bs, na, ny, nx, no) a level, as views of its convolutions' outputs.

    Channels are the outputs of one anchor after the other. The results take the place of the feature maps in ``x``, as in stock.
    """
    outputs = (convolution(features) for convolution, features in zip(detect.m, x))
    x[:] = [output.unflatten(1, (detect.na, detect.no)).movedim(2, -1) for output in outputs]
    return x


@functools.cache
def _is_stocks(forward: Any) -> bool:
    """Whether this is what stock's ``Detect.forward`` computes in training: forks change it under the same name."""
    attributes = {"nl": 2, "na": 2, "no": 3, "m": list(stand_ins("0", "1").values()), "training": True, "export": False}
    return agree(forward, raw_heads, attributes, [pictures(6), -pictures(6)])


@contextlib.contextmanager
def head_views(model: nn.Module) -> Iterator[None]:
    """While inside, YOLOv5's Detect returns its convolutions' outputs as (bs, na, ny, nx, no) views, where stock copies them.

    Losses index heads by these five dimensions, whatever their strides; ComputeLoss writes its gradients in the same
    layout, so that neither the outputs nor their gradients are copied. Models without stock's Detect at their end are left alone,
    as is a model in eval mode.
    """
    detect = stock_detect(model, "forward", STOCK_MODULES)
    known = detect is not None and _is_stocks(type(detect).forward)
    with own_attributes([(detect, "forward", functools.partial(raw_heads, detect))] if known else []):
        yield


@contextlib.contextmanager
def fewer_copies(model: nn.Module) -> Iterator[None]:
    """While inside, the model's values are stock's with fewer copies: :func:`head_views`, :func:`joined_upsampling` and
    :func:`images_of_bytes`."""
    methods = "forward", "_forward_once"
    with (
        head_views(model),
        joined_upsampling(model, "_forward_once", STOCK_MODULES),
        images_of_bytes(model, methods, STOCK_MODULES),
    ):
        yield
