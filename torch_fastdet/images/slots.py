"""Lends loader processes memory for pixels again and again: clearing fresh pages takes a third of an image's time.

A slot is an anonymous file with one byte behind the pixels that says who has it.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch

from torch_fastdet._say import saying_once, warn
from torch_fastdet.images.fence import fence

#: A slot is free, or lent to a batch.
FREE, LENT = range(2)
#: Slots that a process keeps for later batches.
SPARE = 1


class Slot:
    """Hold ``size`` bytes of shared memory and the byte that says who has them."""

    def __init__(self, fd: int, size: int) -> None:
        everything = np.frombuffer(mmap.mmap(fd, size + 1), dtype=np.uint8)
        self.pixels, self.state = everything[:size], everything[size:]


class _OwnSlot(Slot):
    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("torch_fastdet_batch", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size + 1)
        super().__init__(self.fd, size)

    def __del__(self) -> None:
        if hasattr(self, "fd"):  # not if there were too many open files
            os.close(self.fd)


_own: list[_OwnSlot] = []


class Parcel:
    """Carry a tensor of uint8 to another process, which unpickles an ordinary tensor; copy it where the system refuses shared memory."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        size = math.prod(shape)
        try:
            self._slot: _OwnSlot | None = _take(size)
        except OSError as error:
            self._slot, self._refusal = None, str(error)
            self.tensor = torch.empty(shape, dtype=torch.uint8)
        else:
            self.tensor = torch.from_numpy(self._slot.pixels[:size]).view(shape)

    def __reduce__(self) -> Any:
        if self._slot is None:
            return _receive_copy, (self.tensor.numpy(), self._refusal)
        return _receive, (DupFd(self._slot.fd), len(self._slot.pixels), self.shape)


def _take(size: int) -> _OwnSlot:
    """Return a slot that nobody has, with up to an eighth more room, so that what differs a little takes turns in one."""
    step = 1 << max(size.bit_length() - 4, 0)
    size = -(-size // step) * step
    free = [slot for slot in _own if slot.state[0] == FREE]
    fence()  # nothing is written into a slot before its last reader has done with it
    found = next((slot for slot in free if len(slot.pixels) >= size), None)
    spare = [slot for slot in free if slot is not found and len(slot.pixels) >= size][:SPARE]
    _own[:] = [slot for slot in _own if slot.state[0] == LENT or slot is found or slot in spare]
    if found is None:
        found = _OwnSlot(size)
        _own.append(found)
    found.state[0] = LENT
    return found


# The process that gets batches ----------------------------------------------------------------------------------------

_say_once = saying_once("loader_optim", warn)


def _receive(handle: Any, size: int, shape: tuple[int, ...]) -> torch.Tensor:
    fd = handle.detach()
    try:
        slot = Slot(fd, size)
    finally:
        os.close(fd)
    # Every array and tensor that looks into the slot keeps this object alive.
    pixels = slot.pixels[: math.prod(shape)]
    weakref.finalize(pixels, _release, slot.state, os.getpid()).atexit = False
    return torch.from_numpy(pixels).view(shape)


def _receive_copy(pixels: np.ndarray, refusal: str) -> torch.Tensor:
    _say_once(f"batches of loader processes are copied through a pipe, because there is no memory to share: {refusal}")
    return torch.from_numpy(pixels)


def _release(state: np.ndarray, process: int) -> None:
    if process == os.getpid():  # a process that was forked meanwhile must not free it
        fence()
        state[0] = FREE


os.register_at_fork(after_in_child=_own.clear)
