"""Sends pixels from loader processes in anonymous files, whose memory ``/dev/shm`` does not limit."""

from __future__ import annotations

import math
import mmap
import os
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch


class Parcel:
    """Carry a tensor of uint8 to another process, which unpickles an ordinary tensor."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._fd = os.memfd_create("torch_fastdet_batch", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, math.prod(shape))
        self.tensor = _mapped(self._fd, shape)

    def __reduce__(self) -> tuple[object, ...]:
        return _receive, (DupFd(self._fd), self.shape)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):  # not if there were too many open files
            os.close(self._fd)


def _mapped(fd: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(fd, math.prod(shape)), dtype=np.uint8)).view(shape)


def _receive(handle: Any, shape: tuple[int, ...]) -> torch.Tensor:
    fd = handle.detach()
    try:
        return _mapped(fd, shape)
    finally:
        os.close(fd)
