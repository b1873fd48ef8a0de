"""The predictor's letterbox, BGR to RGB, HWC to CHW and division by 255 of a list of pictures, by one operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_fastdet import ops
from torch_fastdet.patching.import_hook import namespace

MOST_STORAGES = 8
LARGEST_SIDE = 1 << 24


class Placing(NamedTuple):
    """Where a resized picture lies in the network's input. Pixels."""

    height: int
    width: int
    top: int
    left: int
    size: tuple[int, int]


def place(shape: tuple[int, int], imgsz: Any, auto: bool, scale_fill: bool, stride: int) -> Placing:
    """As ``LetterBox`` places a picture of this height and width, in the middle.

    Args:
        imgsz: height and width that are wanted, or one number for both.
        auto: Pad to the next multiple of ``stride`` only.
        scale_fill: Stretch instead of padding, unless ``auto``.
    """
    wanted = (imgsz, imgsz) if isinstance(imgsz, int) else (imgsz[0], imgsz[1])
    ratio = min(wanted[0] / shape[0], wanted[1] / shape[1])
    height, width = (max(round(side * ratio), 1) for side in shape)
    rows, columns = wanted[0] - height, wanted[1] - width
    if auto:
        rows, columns = rows % stride, columns % stride
    elif scale_fill:
        (height, width), rows, columns = wanted, 0, 0
    top, left = round(rows / 2 - 0.1), round(columns / 2 - 0.1)
    bottom, right = round(rows / 2 + 0.1), round(columns / 2 + 0.1)
    return Placing(height, width, top, left, (height + top + bottom, width + left + right))


def fits(pictures: Any) -> bool:
    """Whether the operator takes these pictures: a list of uint8 arrays HWC, all of three channels or all grey."""
    if not isinstance(pictures, list) or not pictures:
        return False
    if any(type(im) is not np.ndarray or im.dtype != np.uint8 or im.ndim != 3 for im in pictures):
        return False
    channels = {im.shape[2] for im in pictures}
    return channels in ({1}, {3}) and all(0 < side <= LARGEST_SIDE for im in pictures for side in im.shape[:2])


def letterbox(pictures: list[np.ndarray], placings: list[Placing], device: torch.device, half: bool) -> Tensor:
    """Pictures to (images, channels, height, width) in 0..1 on ``device``, RGB if they have three channels.

    On CUDA they are copied into one pinned buffer and uploaded together. On the CPU contiguous pictures are read where they are.
    """
    shapes = [im.shape for im in pictures]
    size, channels = list(placings[0].size), shapes[0][2]
    where: list[tuple[int, int]] = []  # of each picture: storage and offset
    in_place = device.type == "cpu" and len(pictures) <= MOST_STORAGES
    if in_place and all(im.flags.c_contiguous and im.flags.writeable for im in pictures):
        storages = [torch.from_numpy(im.reshape(-1)) for im in pictures]
        where = [(i, 0) for i in range(len(pictures))]
    else:
        head = 80 * len(pictures) if device.type == "cuda" else 0  # the plan travels with the pictures
        ends = np.cumsum([head] + [im.size for im in pictures]).tolist()
        buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        for im, begin, end in zip(pictures, ends, ends[1:]):
            np.copyto(buffer[begin:end].numpy().reshape(im.shape), im)
        storages, where = [buffer], [(0, begin) for begin in ends[:-1]]
    plan = torch.tensor(
        [
            [*at, shape[0], shape[1], shape[1] * channels, p.height, p.width, p.top, p.left, 0]
            for at, shape, p in zip(where, shapes, placings)
        ]
    )
    if device.type == "cuda":
        head = 80 * len(pictures)
        storages[0][:head].view(torch.int64).copy_(plan.view(-1))
        storages = [storages[0].to(device, non_blocking=True)]
        plan = storages[0][:head].view(torch.int64).view(len(pictures), 10)
    dtype = torch.float16 if half else torch.float32
    return ops.image_letterbox(storages, plan, size, channels=channels, dtype=dtype)


def preprocessing(stock: Callable, stock_pre_transform: Callable, module: ModuleType) -> Callable:
    """``BasePredictor.preprocess`` whose lists of pictures go through :func:`letterbox`; all else gets stock's."""
    stock_letterbox = namespace(module).get("LetterBox")

    @functools.wraps(stock)
    def preprocess(self: Any, im: Any) -> Tensor:
        if type(self).pre_transform is not stock_pre_transform or "pre_transform" in vars(self):
            return stock(self, im)  # a predictor with a pre_transform of its own keeps it
        if namespace(module).get("LetterBox") is not stock_letterbox or not fits(im):
            return stock(self, im)
        device = torch.device(self.device)
        model = self.model
        rectangle = len({x.shape for x in im}) == 1 and self.args.rect and not self.scale_fill
        shrinks = model.format == "pt" or (getattr(model, "dynamic", False) and model.format != "imx")
        placings = [
            place(x.shape[:2], self.imgsz, rectangle and shrinks, self.scale_fill, int(model.stride)) for x in im
        ]
        if device.type not in ("cpu", "cuda") or len({p.size for p in placings}) != 1:
            return stock(self, im)
        return letterbox(im, placings, device, bool(model.fp16))

    return preprocess


def is_stocks(predictor: Any, ours: Callable) -> bool:
    """Whether ``ours`` prepares small pictures as ``predictor`` does: of another version it may do something else."""
    picture = np.arange(3 * 40 * 31, dtype=np.uint8).reshape(31, 40, 3)
    cases = [
        ([picture], "pt", False, True, False),
        ([picture[:20], picture[:20, :17]], "pt", False, True, True),
        ([picture[:, :, :1]], "onnx", False, True, False),
        ([picture], "onnx", True, False, False),
    ]
    for pictures, kind, dynamic, rect, half in cases:
        model = SimpleNamespace(format=kind, dynamic=dynamic, fp16=half, stride=32)
        settings = {"imgsz": [64, 96], "args": SimpleNamespace(rect=rect), "model": model, "device": "cpu"}
        probe = type("Probe", (predictor,), {"__init__": lambda self: None})()
        vars(probe).update(settings)
        try:
            wanted, got = predictor.preprocess(probe, pictures), ours(probe, pictures)
        except Exception:
            return False
        if wanted.dtype != got.dtype or not torch.equal(wanted, got):
            return False
    return True
