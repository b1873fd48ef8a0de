"""Postpones work of the host until the GPU has something else to do."""

from __future__ import annotations

import threading
from collections.abc import Callable


class _Waiting(threading.local):
    work: Callable[[], object] | None = None
    launched = False


_waiting = _Waiting()


def run() -> None:
    """Do what this thread has postponed."""
    work, _waiting.work = _waiting.work, None
    if work is not None:
        work()


def launched() -> None:
    """Do what waits, as the GPU is busy now. What follows may wait for the next call."""
    run()
    _waiting.launched = True


def may_postpone() -> bool:
    """Return whether :func:`launched` was called since the last time: it will be again."""
    found, _waiting.launched = _waiting.launched, False
    return found


def postpone(work: Callable[[], object]) -> None:
    run()
    _waiting.work = work
