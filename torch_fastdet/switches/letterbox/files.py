"""JPEG files to predict on, decoded on the GPU with OpenCV's pixels, for the switch ``letterbox_optim`` of both hosts.

The hosts' results hold a picture as an array on the host. So its pixels come back, and the network's input is made of that array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import cv2
import numpy as np
import torch

from torch_fastdet import ops
from torch_fastdet.images.jpeg import is_jpeg
from torch_fastdet.memory import is_out_of_memory


@functools.cache
def _beside_the_network(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def decoded(path: str, device: torch.device) -> np.ndarray | None:
    """A file's pixels, B G R; None where OpenCV is to make them, or to say what is wrong."""
    if not is_jpeg(path):
        return None
    try:
        file = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
        with torch.cuda.stream(_beside_the_network(device)):
            (pixels,) = ops.decode_jpeg([file], device)
            return pixels.cpu().numpy()
    except Exception as error:
        if isinstance(error, (OSError, ValueError)) or is_out_of_memory(error):  # pinned memory, too
            return None
        raise


def imread_on(device: torch.device, stock: Callable[..., np.ndarray | None]) -> Callable[..., np.ndarray | None]:
    """The host's ``imread``, by :func:`decoded` where that takes the file."""

    def imread(filename: str, flags: int = cv2.IMREAD_COLOR) -> np.ndarray | None:
        pixels = decoded(filename, device) if flags == cv2.IMREAD_COLOR else None
        return stock(filename, flags) if pixels is None else pixels

    return imread
