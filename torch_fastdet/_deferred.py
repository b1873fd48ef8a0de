"""Collects errors of operators on a GPU, which the host raises later instead of waiting for them."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator

import torch

from torch_fastdet._say import rank, say
from torch_fastdet._torch.private import lost_cuda_in_fork


class DeferredStatus:
    """Bring the status of operators on a GPU to the host without waiting: a later call sees those that have arrived.

    ``describe`` returns a line that says what a status and the number given with it mean, or None.
    """

    MOST_PENDING = 64

    def __init__(self, describe: Callable[[list[int], int], str | None]) -> None:
        self._describe = describe
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event, int, torch.device]] = deque()
        self._free: dict[torch.device, list[tuple[torch.Tensor, torch.cuda.Event]]] = {}

    def add(self, status: torch.Tensor, rows: int) -> None:
        if len(self._pending) >= self.MOST_PENDING:  # bounds the memory; the oldest is long done
            self._pending[0][1].synchronize()
            self.raise_arrived()
        free = self._free.get(status.device)
        if free:
            buffer, event = free.pop()
        else:
            with torch.inference_mode(False):  # later losses write into it, in training too
                buffer = torch.empty(status.shape, dtype=status.dtype, pin_memory=True)
            event = torch.cuda.Event()
        buffer.copy_(status, non_blocking=True)
        event.record(torch.cuda.current_stream(status.device))  # where the copy runs, whatever device is current
        self._pending.append((buffer, event, rows, status.device))
        _unread.add(self)

    def raise_arrived(self, wait: bool = False) -> None:
        """Raise ValueError for the first status that arrived and has an error. ``wait``: wait for all of them first."""
        while self._pending and (wait or self._pending[0][1].query()):
            buffer, event, rows, device = self._pending.popleft()
            if not self._pending:
                _unread.discard(self)
            event.synchronize()
            status = buffer.tolist()
            self._free.setdefault(device, []).append((buffer, event))  # an event belongs to one device
            error = self._describe(status, rows)
            if error is not None:
                raise ValueError(error)


_unread: set[DeferredStatus] = set()  # which have something pending; kept alive after their losses


@contextlib.contextmanager
def raised_at_the_end() -> Iterator[None]:
    """Raise the errors that no later call has seen, if a program ends well. Ranks above 0 print their own: rank 0 may still be saving."""
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        _raise_unread()
        raise
    else:
        _raise_unread()
    finally:
        _unread.clear()


def _raise_unread(say_all: bool = False) -> None:
    for status in list(_unread):
        try:
            status.raise_arrived(wait=True)
        except ValueError as error:
            if not say_all and rank() in ("", "0"):
                raise
            where = f"rank {rank()}, in one of its last steps" if rank() else "in one of the last steps"
            say(f"{where}: {error}", logging.ERROR, every_rank=True)


@atexit.register
def _say_unread() -> None:
    """Print unread errors when a program with a loop of its own ends: nothing can be raised any more."""
    with contextlib.suppress(RuntimeError):  # of a GPU that failed, which the program has seen
        if not lost_cuda_in_fork():
            _raise_unread(say_all=True)
