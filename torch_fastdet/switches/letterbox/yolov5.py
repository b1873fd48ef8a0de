"""``LoadImages`` of detect.py and its like: JPEG files decoded on the GPU that the network is on."""

from __future__ import annotations

import functools
from types import BuiltinFunctionType
from typing import Any

import torch

from torch_fastdet.images.recorder import recording_module
from torch_fastdet.patching.import_hook import top_level
from torch_fastdet.patching.replace import is_code_of, with_names
from torch_fastdet.switches.letterbox.files import imread_on


def _gpu() -> torch.device | None:
    """The loader is not told where the network is. A script on the CPU starts no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None


def reading(stock: Any) -> object:
    """``LoadImages.__next__`` in which ``cv2.imread``, OpenCV's or YOLOv5's, has JPEG files decoded on the GPU."""
    names = stock.__globals__

    @functools.wraps(stock)
    def following(self: Any) -> object:
        device, stock_cv2 = _gpu(), names["cv2"]
        theirs = stock_cv2.imread
        known = isinstance(theirs, BuiltinFunctionType) or is_code_of(theirs, top_level(names["__name__"]))
        if device is None or not known:
            return stock(self)
        ours = recording_module(stock_cv2, {"imread": imread_on(device, theirs)})
        return with_names(stock, cv2=ours)(self)

    return following
