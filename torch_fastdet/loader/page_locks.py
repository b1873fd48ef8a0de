"""Page-locked memory, from which copies to the GPU overlap what it does."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Callable

import torch

from torch_fastdet._library import LIBRARY
from torch_fastdet._say import say
from torch_fastdet.loader.memory import CHUNK

# How many use a piece of memory that is page-locked, by its address: two loaders may show one data set.
_locked: defaultdict[int, int] = defaultdict(int)
_locked_lock = threading.RLock()  # the garbage collector may end a loader inside


def lock_pages(address: int, size: int) -> str:
    """Page-lock a piece of memory, so that copies from there overlap what the GPU does. "", or why CUDA refuses."""
    with _locked_lock:
        if not _locked[address]:
            error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
            if int(error) != 0:
                _forget_error()
                return str(torch.cuda.cudart().cudaGetErrorString(error))
        _locked[address] += 1
        return ""


def unlock_pages(address: int) -> None:
    with _locked_lock:
        _locked[address] -= 1
        if not _locked[address] and int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
            _forget_error()


def _forget_error() -> None:
    """Clear the last error that CUDA's runtime keeps for this thread: the next launch would report it as its own."""
    ctypes.CDLL(str(LIBRARY)).cudaGetLastError()  # torch does not offer it; the library is linked with torch's runtime


class PageLocks:
    """Pieces of the shared memory that are page-locked, until this object goes.

    Args:
        host: the shared memory.
        finish: waits for all copies from there; called before pages are unlocked.
    """

    def __init__(self, host: torch.Tensor, finish: Callable[[], None]) -> None:
        self._host = host
        self._finish = finish
        #: Whether each piece that was asked for is locked, by its number.
        self.pieces: dict[int, bool] = {}
        self._process = os.getpid()

    def lock(self, start: int, size: int) -> None:
        """Lock the pieces that hold a picture, so that its copy overlaps the step. One line says if CUDA refuses."""
        for piece in range(start // CHUNK, (start + size - 1) // CHUNK + 1):
            if piece in self.pieces:
                continue
            begin = piece * CHUNK
            reason = lock_pages(self._host.data_ptr() + begin, min(CHUNK, self._host.numel() - begin))
            if reason and all(self.pieces.values()):
                say(
                    f"loader_optim: copies of pictures to the GPU do not overlap: CUDA cannot lock their memory ({reason})"
                )
            self.pieces[piece] = not reason

    def __del__(self) -> None:
        locked = [piece for piece, locked in self.pieces.items() if locked]
        if self._process != os.getpid():
            return  # it was forked: there is no CUDA, and the locks are the parent's
        if locked:
            self._finish()
        for piece in locked:
            unlock_pages(self._host.data_ptr() + piece * CHUNK)
