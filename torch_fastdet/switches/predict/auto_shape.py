"""``AutoShape.forward`` for pictures: letterbox, HWC to CHW and division by 255 of the whole list by one operator.

YOLOv5's own function runs, in a copy in which what it does to the pictures before the network is put off.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_fastdet._say import saying_once, warn
from torch_fastdet.images.recorder import recording_module
from torch_fastdet.ops.letterbox import place
from torch_fastdet.patching.import_hook import namespace
from torch_fastdet.patching.replace import with_names
from torch_fastdet.switches.predict.common import fits, letterbox

RUNS = "runs stock's AutoShape.forward"


class _Batch:
    """Passes for the array, and then for the tensor, of letterboxed pictures: a division by 255 runs the operator.

    Anything else is done by the array, or the tensor, that YOLOv5's letterbox makes.
    """

    def __init__(self, pictures: list[Any], shape: Any, stock_letterbox: Callable) -> None:
        self._pictures, self._shape, self._letterbox = pictures, shape, stock_letterbox
        self._device, self._dtype = torch.device("cpu"), torch.uint8
        self._is_tensor = self._is_planar = False

    def _placings(self) -> list[Any] | None:
        if not (self._is_tensor and self._is_planar and fits(self._pictures) and self._pictures[0].shape[2] == 3):
            return None
        placings = [place(picture.shape[:2], self._shape) for picture in self._pictures]
        # OpenCV refuses a side that is rounded to zero: its error is stock's.
        return placings if all(min(p.height, p.width) > 1 for p in placings) else None

    def _made(self) -> Any:
        made: np.ndarray = np.array(
            [self._letterbox(picture, self._shape, auto=False)[0] for picture in self._pictures]
        )
        made = made.transpose((0, 3, 1, 2)) if self._is_planar else made
        return torch.from_numpy(np.ascontiguousarray(made)).to(self._device, self._dtype) if self._is_tensor else made

    def transpose(self, *axes: Any) -> Any:
        if axes != ((0, 3, 1, 2),) or self._is_tensor or self._is_planar:
            return self._made().transpose(*axes)
        self._is_planar = True
        return self

    def tensor(self) -> _Batch:
        self._is_tensor = True
        return self

    def to(self, device: torch.device) -> _Batch:
        self._device = device
        return self

    def type_as(self, other: Tensor) -> _Batch:
        self._device, self._dtype = other.device, other.dtype
        return self

    def __truediv__(self, divisor: Any) -> Any:
        placings = self._placings() if divisor == 255 else None
        if placings is None:
            return self._made() / divisor
        return letterbox(self._pictures, placings, self._device, self._dtype, bgr=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made(), name)


class _Boxed(NamedTuple):
    """A picture whose letterbox is put off."""

    picture: np.ndarray
    shape: list[int]


def _recording(stock: types.FunctionType, names: dict[str, Any], stock_letterbox: object) -> Callable:
    """A copy of ``forward`` that puts the letterbox off until it knows the device."""
    if names["letterbox"] is not stock_letterbox:
        return stock

    def boxed(picture: np.ndarray, shape: list[int], auto: bool = True) -> tuple:
        return stock_letterbox(picture, shape) if auto else (_Boxed(picture, shape),)

    def array(pictures: object) -> Any:
        if isinstance(pictures, list) and pictures and all(isinstance(one, _Boxed) for one in pictures):
            return _Batch([one.picture for one in pictures], pictures[0].shape, stock_letterbox)
        return np.array(pictures)

    def ascontiguousarray(value: object) -> Any:
        return value if isinstance(value, _Batch) else np.ascontiguousarray(value)

    def from_numpy(value: object) -> Any:
        return value.tensor() if isinstance(value, _Batch) else torch.from_numpy(value)

    recording = {
        id(np): recording_module(np, {"array": array, "ascontiguousarray": ascontiguousarray}),
        id(torch): recording_module(torch, {"from_numpy": from_numpy}),
        id(stock_letterbox): boxed,
    }
    found = {name: recording[id(value)] for name, value in names.items() if id(value) in recording}
    return with_names(stock, **found)


def detecting(
    stock_class: object, stock: Callable, module: ModuleType, devices: tuple[str, ...] = ("cuda",)
) -> Callable:
    """``AutoShape.forward`` whose pictures go through the operator where the model is on one of ``devices``.

    Tensors, other devices, models of other dtypes than float16 and float32, and users' subclasses get stock's.
    """
    names = namespace(module)
    stock_letterbox = names.get("letterbox")
    inner: Any = getattr(stock, "__wrapped__", stock)  # under torch.inference_mode
    tell = saying_once("predict_optim", warn)

    @functools.wraps(stock)
    def forward(self: Any, ims: object, size: object = 640, augment: bool = False, profile: bool = False) -> Any:
        if isinstance(ims, Tensor) or (isinstance(ims, (list, tuple)) and not ims):
            return stock(self, ims, size, augment, profile)
        if type(self) is not stock_class:
            tell(f"{type(self).__name__} derives from AutoShape, and {RUNS}")
            return stock(self, ims, size, augment, profile)
        like = next(self.model.parameters()) if self.pt else torch.empty(1, device=self.model.device)
        if like.device.type not in devices or like.dtype not in (torch.float16, torch.float32):
            tell(f"the model is {like.dtype} on {like.device.type}, and {RUNS}")
            return stock(self, ims, size, augment, profile)
        with torch.inference_mode():
            return _recording(inner, names, stock_letterbox)(self, ims, size, augment, profile)

    return forward


class _Network:
    """Stands for a model in the probe: keeps its input and finds the same boxes in each picture."""

    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype) -> None:
        self.weight = torch.zeros(1, dtype=dtype)
        self.input = self.weight

    def parameters(self) -> Any:
        return iter([self.weight])

    def __call__(self, x: Tensor, augment: bool = False) -> Any:
        self.input = x
        rows = torch.tensor(
            [[30.0, 30, 20, 14, 0.9, 0.8, 0.1], [34, 20, 9, 30, 0.8, 0.2, 0.9], [9, 9, 4, 4, 0.1, 1, 1]]
        )
        return [rows.repeat(len(x), 1, 1)]


class _NoTimes(contextlib.nullcontext):
    """Stands for YOLOv5's ``Profile`` in the probe, because that one starts CUDA."""

    t = 0.0


def prepared(stock_class: Any, forward: Callable, module: ModuleType) -> list[object]:
    """What the network gets of small pictures by ``forward``, and what that returns."""
    names = namespace(module)
    picture = np.arange(3 * 40 * 31, dtype=np.uint8).reshape(31, 40, 3)
    profile = names.get("Profile")
    results: list[object] = []
    try:
        names["Profile"] = _NoTimes
        for pictures, size, dtype in (
            ([picture, picture[:20, :17], picture[..., 0]], 64, torch.float32),
            (picture.transpose(2, 0, 1), (96, 64), torch.float16),
        ):
            model, network = stock_class.__new__(stock_class), _Network(dtype)
            torch.nn.Module.__init__(model)
            stride = torch.tensor([8.0, 16, 32])
            vars(model).update(dmb=False, pt=True, model=network, stride=stride, names={0: "a", 1: "b"})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # stock's torch.cuda.amp.autocast is deprecated
                found = forward(model, pictures, size)
            results.append((network.input, found.pred, found.xywhn, found.ims, found.files, found.s))
    finally:
        names["Profile"] = profile
    return results
