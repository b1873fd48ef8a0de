"""Memory for batches that are made on the CPU.

Fresh memory costs a page fault every 4 KiB, a quarter of the time in which a batch is made. So each loader process keeps a few
*slots*, which the loop's process maps once, and uses a slot again when nobody holds the batch in it any more: the last
tensor, view or array that shares the batch's storage gives it back. Batches that are made in the loop's process get large pages.
"""

from __future__ import annotations

import itertools
import math
import mmap
import multiprocessing.context
import os
import weakref
from collections.abc import Callable

import numpy as np
import torch

from torch_fastdet._private import shared_bytes

#: Slots of a loader process, which is asked for so many batches at once. A batch that finds none free gets memory of its own.
SLOTS = 2
#: Batches below this size get memory of their own.
SMALL = 1 << 20

_numbers = itertools.count()
# In the loop's process, for each set: which slots are taken, and the slots that have come, by loader process and slot.
_received: dict[int, tuple[np.ndarray, dict[tuple[int, int], np.ndarray]]] = {}
# What ends with the batch in a slot, for those that are held now.
_held: dict[tuple[int, int, int], weakref.finalize] = {}


class Slots:
    """The slots of one iterator of a ``DataLoader``. Make it before the loader processes start.

    Args:
        workers: the number of loader processes.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.smallest = SMALL
        self._number = next(_numbers)
        # A loader process sets a mark, the loop's process clears it.
        self._marks = shared_bytes((workers, SLOTS)).zero_()
        self._own: list[torch.Tensor] = []
        _received[self._number] = self._marks.numpy(), {}
        weakref.finalize(self, _received.pop, self._number, None)

    def take(self, worker: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, object]:
        """In loader process ``worker``: a uint8 tensor to fill, and what to send in its place."""
        size, marks = math.prod(shape), self._marks[worker].numpy()
        if size < self.smallest:
            return (fresh := shared_bytes(shape)), fresh
        for slot, memory in enumerate(self._own):
            if not marks[slot] and len(memory) >= size:
                marks[slot] = 1
                return memory[:size].view(shape), _Message(self._number, worker, slot, None, shape)
        slot = len(self._own)
        if slot == SLOTS:
            return (fresh := shared_bytes(shape)), fresh
        memory = shared_bytes((size,))
        self._own.append(memory)
        marks[slot] = 1
        return memory.view(shape), _Message(self._number, worker, slot, memory, shape)

    def __reduce__(self) -> tuple[Callable, tuple]:
        if multiprocessing.context.get_spawning_popen() is None:
            return Slots, (self.workers,)
        return _attach, (self.workers, self.smallest, self._number, self._marks)


def _attach(workers: int, smallest: int, number: int, marks: torch.Tensor) -> Slots:
    """The same slots in a process that was spawned."""
    slots = object.__new__(Slots)
    slots.workers, slots.smallest, slots._number, slots._marks, slots._own = workers, smallest, number, marks, []
    return slots


class _Message:
    """A batch in a slot, on its way: it arrives as a tensor. ``memory`` goes with the first batch of a slot."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable, tuple]:
        return _arrive, self.arguments


def _arrive(number: int, worker: int, slot: int, memory: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    marks, received = _received[number]
    if memory is not None:
        received[worker, slot] = memory.numpy()
    # An array that only this batch's storage refers to.
    holder = received[worker, slot][: math.prod(shape)]
    ended = weakref.finalize(holder, _give_back, marks, (number, worker, slot), os.getpid())
    ended.atexit = False
    _held[number, worker, slot] = ended
    return torch.from_numpy(holder).view(shape)


def _give_back(marks: np.ndarray, place: tuple[int, int, int], process: int) -> None:
    if os.getpid() == process:  # not one that was forked, and whose copy ends
        _held.pop(place, None)
        marks[place[1:]] = 0


def _keep_for_the_child() -> None:
    """A process that is forked may use the batches that are held now: their slots are not used again."""
    while _held:
        _held.popitem()[1].detach()


os.register_at_fork(before=_keep_for_the_child)


def fresh_bytes(shape: tuple[int, ...]) -> torch.Tensor:
    """An uninitialised uint8 tensor in memory of its own, with large pages where the system gives them."""
    size = math.prod(shape)
    if size < max(SMALL, 1) or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)
