"""Replaces ``AutoShape.forward`` for images: letterbox, HWC to CHW and division by 255 of the whole list by one operator.

YOLOv5's own function runs, in a copy in which what it does to the images before the network is put off.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_fastdet._say import saying_once, warn
from torch_fastdet.images.recorder import recording_module
from torch_fastdet.ops.letterbox import place
from torch_fastdet.patching.import_hook import namespace
from torch_fastdet.patching.protocols import Function, Model, Stock
from torch_fastdet.patching.replace import with_names
from torch_fastdet.switches.predict.common import fits, letterbox

RUNS = "runs the original AutoShape.forward"


class _Boxed(NamedTuple):
    """Stand for an image whose letterbox is put off."""

    image: np.ndarray
    shape: list[int]


class _Input:
    """Stand for the network's input. What YOLOv5 does to letterboxed images before the network leaves it as it is."""

    def __init__(self, pixels: Tensor) -> None:
        self._pixels = pixels

    def _as_it_is(self, *_: object) -> _Input:
        return self

    transpose = to = type_as = _as_it_is

    def __truediv__(self, _: object) -> Tensor:
        return self._pixels


def _recording(stock: types.FunctionType, stock_letterbox: Function, like: Tensor) -> Function:
    """Return a copy of ``forward`` that puts the letterbox off until it has all images. The input is of the device and dtype of ``like``."""

    def boxed(image: np.ndarray, shape: list[int], auto: bool = True) -> object:
        return stock_letterbox(image, shape) if auto else (_Boxed(image, shape),)

    def array(boxes: Any) -> object:
        if not isinstance(boxes[0], _Boxed):
            return np.array(boxes)
        images = [box.image for box in boxes]
        if fits(images) and images[0].shape[2] == 3:
            placings = [place(image.shape[:2], shape) for image, shape in boxes]
            # OpenCV refuses a side that is rounded to zero, so its error is raised as in the original.
            if all(min(p.height, p.width) > 1 for p in placings):
                return _Input(letterbox(images, placings, like.device, like.dtype, bgr=True))
        return np.array([stock_letterbox(image, shape, auto=False)[0] for image, shape in boxes])

    def unless_input(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: value if isinstance(value, _Input) else function(value)

    of_numpy = {"array": array, "ascontiguousarray": unless_input(np.ascontiguousarray)}
    of_torch = {"from_numpy": unless_input(torch.from_numpy)}
    return with_names(
        stock, np=recording_module(np, of_numpy), torch=recording_module(torch, of_torch), letterbox=boxed
    )


def detecting(_: object, stock: Function, stock_class: Stock, devices: tuple[str, ...] = ("cuda",)) -> Function:
    """Return ``AutoShape.forward`` whose images go through the operator where the model is on one of ``devices``.

    Tensors, other devices, models of other dtypes than float16 and float32, and users' subclasses get the original.
    """
    names = namespace(sys.modules[stock_class.__module__])
    stock_letterbox: Stock = names.get("letterbox")
    inner: Model = getattr(stock, "__wrapped__", stock)  # under torch.inference_mode
    tell = saying_once("predict_optim", warn)

    @functools.wraps(stock)
    def forward(self: Model, ims: object, size: object = 640, augment: bool = False, profile: bool = False) -> object:
        if isinstance(ims, Tensor) or (isinstance(ims, (list, tuple)) and not ims):
            return stock(self, ims, size, augment, profile)
        if type(self) is not stock_class:
            tell(f"{type(self).__name__} derives from AutoShape, and {RUNS}")
            return stock(self, ims, size, augment, profile)
        like = next(self.model.parameters()) if self.pt else torch.empty(1, device=self.model.device)
        if like.device.type not in devices or like.dtype not in (torch.float16, torch.float32):
            tell(f"the model is {like.dtype} on {like.device.type}, and {RUNS}")
            return stock(self, ims, size, augment, profile)
        if names["letterbox"] is not stock_letterbox:
            return stock(self, ims, size, augment, profile)
        with torch.inference_mode():
            return _recording(inner, stock_letterbox, like)(self, ims, size, augment, profile)

    return forward
