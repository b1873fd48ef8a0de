"""``LoadImages`` of detect.py and its like: JPEG files decoded on the GPU that the network is on."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import torch

from torch_fastdet.hosts.shared.files import decoded, with_names
from torch_fastdet.loader.recorder import recording_module


def _gpu() -> torch.device | None:
    """The loader is not told where the network is. A script on the CPU starts no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None


def reading(stock: Any) -> Any:
    """``LoadImages.__next__`` in which ``cv2.imread`` has JPEG files decoded on the GPU."""
    stock_cv2 = stock.__globals__["cv2"]

    def imread(filename: str, flags: int = cv2.IMREAD_COLOR) -> np.ndarray | None:
        device = _gpu() if flags == cv2.IMREAD_COLOR else None
        pixels = None if device is None else decoded(filename, device)
        return stock_cv2.imread(filename, flags) if pixels is None else pixels

    return with_names(stock, cv2=recording_module(stock_cv2, {"imread": imread}))
