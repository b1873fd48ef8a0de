"""``LoadImages`` of detect.py and its like: JPEG files decoded on the GPU that the network is on."""

from __future__ import annotations

import functools
from types import BuiltinFunctionType
from typing import Any

import cv2
import numpy as np
import torch

from torch_fastdet.hosts.engine.import_hook import top_level
from torch_fastdet.hosts.engine.replace import is_code_of
from torch_fastdet.hosts.shared.files import decoded, with_names
from torch_fastdet.loader.recorder import recording_module


def _gpu() -> torch.device | None:
    """The loader is not told where the network is. A script on the CPU starts no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None


def reading(stock: Any) -> Any:
    """``LoadImages.__next__`` in which ``cv2.imread``, OpenCV's or YOLOv5's, has JPEG files decoded on the GPU."""
    names = stock.__globals__

    @functools.wraps(stock)
    def following(self: Any) -> Any:
        device, stock_cv2 = _gpu(), names["cv2"]
        theirs = stock_cv2.imread
        known = isinstance(theirs, BuiltinFunctionType) or is_code_of(theirs, top_level(names["__name__"]))
        if device is None or not known:
            return stock(self)

        def imread(filename: str, flags: int = cv2.IMREAD_COLOR) -> np.ndarray | None:
            pixels = decoded(filename, device) if flags == cv2.IMREAD_COLOR else None
            return theirs(filename, flags) if pixels is None else pixels

        return with_names(stock, cv2=recording_module(stock_cv2, {"imread": imread}))(self)

    return following
