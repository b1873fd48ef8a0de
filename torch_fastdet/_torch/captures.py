"""Allows one capture at a time in a process, and none while somebody waits for the whole device, which would end it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator


class Captures:
    """Know which thread captures, and which threads wait for the device."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._waiting: Counter[int] = Counter()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            # A thread that captures inside none() does not count as waiting, or two such threads would wait for each other.
            own = self._waiting.pop(me, 0)
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._owner is None)
                self._owner = me
                self._changed.wait_for(lambda: not self._waiting)
            yield
        finally:
            with self._changed:
                if self._owner == me:
                    self._owner = None
                if own:
                    self._waiting[me] = own
                self._changed.notify_all()

    def here(self) -> bool:
        """Return whether this thread captures."""
        return self._owner == threading.get_ident()

    @contextlib.contextmanager
    def none(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._owner in (None, me))
            self._waiting[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting[me] -= 1
                self._waiting += Counter()  # without those that are zero
                self._changed.notify_all()


_captures = Captures()
os.register_at_fork(after_in_child=_captures.__init__)  # type: ignore[misc]  # the thread that captures stays in the parent
one_capture, captures_here = _captures.one, _captures.here
#: Encloses code that would break another thread's capture, such as torch.cuda.synchronize() or the device's random numbers. Captures of
#: other threads wait until it ends.
no_capture = _captures.none
