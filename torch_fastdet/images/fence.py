"""Orders memory that processes share without a lock: whoever sees a mark sees what was written before the mark was set."""

from __future__ import annotations

import platform
import threading

#: These processors keep loads in program order, and stores too.
_IN_ORDER = platform.machine() in ("x86_64", "AMD64", "i386", "i686")


def fence() -> None:
    """Complete this thread's reads and writes before any later ones: between some bytes and the mark that announces them.

    On aarch64, releasing one lock and then taking another is a full barrier.
    """
    if not _IN_ORDER:
        for _ in range(2):
            with threading.Lock():
                pass
