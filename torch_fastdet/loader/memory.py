"""Decoded pictures in memory that all processes of a data loader share.

The memory is an anonymous file (``memfd``): it has no name, so nothing is left behind however a process ends, and the size
of ``/dev/shm`` does not matter. Every picture has its place from the start, because the label scan knows the sizes; pages
are taken when a picture is written. Whoever decodes a picture first writes it, then sets its mark.
"""

from __future__ import annotations

import mmap
import multiprocessing.context
import multiprocessing.reduction
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torch_fastdet.memory import HOST_BUDGET, Owner, is_low, register

#: Places never cross a multiple of this: a GPU's driver pins the memory in such pieces.
CHUNK = 64 << 20
ALIGNMENT = 64
CHANNELS = 3


class PictureMemory(Owner):
    """A place for each of ``n`` pictures, as far as a budget goes.

    Args:
        shapes: (height, width) of each picture as it will be kept, or somewhat more.
        budget: bytes that pictures may take.
        fd: the file of such a memory in another process, with the same shapes and budget; it is taken over.
    """

    what, budget = "decoded pictures", HOST_BUDGET

    def __init__(self, shapes: Sequence[tuple[int, int]] | np.ndarray, budget: int, fd: int | None = None) -> None:
        self.shapes = np.asarray(shapes, dtype=np.int64).reshape(-1, 2)
        self.offsets, self.nbytes = _places(self.shapes, budget)
        self._fd: int | None = None
        self._puts = 0
        self._full = False
        self._open(fd)

    def fileno(self) -> int:
        assert self._fd is not None
        return self._fd

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def places(self) -> int:
        """How many pictures have a place."""
        return int((self.offsets >= 0).sum())

    def held(self) -> int:
        return self.nbytes

    def used(self) -> int:
        return int(self.sizes(np.flatnonzero(self._marks)).sum())

    @property
    def wanted(self) -> int:
        """Bytes that all pictures together would take."""
        return int(self.shapes.prod(1).sum()) * CHANNELS

    def has(self, index: int) -> bool:
        return bool(self._marks[index])

    def has_all(self) -> bool:
        return bool(self._marks.all())

    def get(self, index: int) -> np.ndarray | None:
        """The picture, a view into the memory; None where it is not there."""
        if not self._marks[index]:
            return None
        height, width = self.shape(index)
        start = int(self.offsets[index])
        return self.pixels[start : start + height * width * CHANNELS].reshape(height, width, CHANNELS)

    def shape(self, index: int) -> tuple[int, int]:
        """(height, width) of a picture that is there."""
        height, width = self._sizes[index, :2].tolist()
        return height, width

    def original(self, index: int) -> tuple[int, int]:
        """(height, width) of its file's picture, before it was resized."""
        height, width = self._sizes[index, 2:].tolist()
        return height, width

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """Bytes of pictures that are there."""
        return self._sizes[indices, :2].astype(np.int64).prod(1) * CHANNELS

    def put(self, index: int, picture: np.ndarray, original: tuple[int, int]) -> bool:
        """Keep a picture. False where it has no place, is larger than announced, or memory runs low."""
        start, room = int(self.offsets[index]), int(self.shapes[index].prod()) * CHANNELS
        if start < 0 or picture.dtype != np.uint8 or picture.shape[2:] != (CHANNELS,) or picture.size > room:
            return False
        if not self._marks[index]:
            if self._is_full():
                return False
            # Two processes may write the same picture at once: the same bytes.
            self.pixels[start : start + picture.size] = picture.reshape(-1)
            self._sizes[index] = (*picture.shape[:2], *original)
            self._marks[index] = 1
        return True

    def tensor(self) -> torch.Tensor:
        """All places as one tensor of bytes, on the CPU; offsets are positions in it."""
        return torch.from_numpy(self.pixels)

    def _is_full(self) -> bool:
        self._puts += 1
        if not self._full and self._puts % 16 == 1:
            self._full = is_low()
        return self._full

    def _open(self, fd: int | None = None) -> None:
        n = len(self.shapes)
        sizes = -(-n // ALIGNMENT) * ALIGNMENT
        head = -(-(sizes + n * 16) // mmap.PAGESIZE) * mmap.PAGESIZE
        if fd is None:
            fd = os.memfd_create("torch_fastdet_pictures", os.MFD_CLOEXEC)
            os.ftruncate(fd, head + self.nbytes)
        self._fd = fd
        everything = np.frombuffer(mmap.mmap(fd, head + self.nbytes), dtype=np.uint8)
        self._marks = everything[:n]
        #: height, width, and those of the file
        self._sizes = everything[sizes : sizes + n * 16].view(np.int32).reshape(n, 4)
        self.pixels = everything[head:]
        register(self)

    def __del__(self) -> None:
        # The mapping itself goes with the last array or tensor that looks into it.
        fd = getattr(self, "_fd", None)
        if fd is not None:
            os.close(fd)

    def __getstate__(self) -> dict[str, Any]:
        # Processes that are spawned get the same memory; a copy of the data set (deepcopy, a file) gets one of its own.
        spawning = multiprocessing.context.get_spawning_popen() is not None
        fd = multiprocessing.reduction.DupFd(self.fileno()) if spawning else None
        return {"shapes": self.shapes, "offsets": self.offsets, "nbytes": self.nbytes, "fd": fd}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.shapes, self.offsets, self.nbytes = state["shapes"], state["offsets"], state["nbytes"]
        self._fd, self._puts, self._full = None, 0, False
        self._open(None if state["fd"] is None else state["fd"].detach())


def _places(shapes: np.ndarray, budget: int) -> tuple[np.ndarray, int]:
    """The offset of each picture (-1: none), and the bytes of all."""
    offsets = np.full(len(shapes), -1, dtype=np.int64)
    end = 0
    for index, size in enumerate((shapes.prod(1) * CHANNELS).tolist()):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if size <= CHUNK and start // CHUNK != (start + size - 1) // CHUNK:
            start = (start // CHUNK + 1) * CHUNK
        if size and start + size <= budget:
            offsets[index] = start
            end = start + size
    return offsets, end
