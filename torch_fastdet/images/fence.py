"""Order for memory that processes share without a lock: whoever sees a mark sees what was written before the mark was set."""

from __future__ import annotations

import platform
import threading

#: These processors keep the program's order between loads, and between stores.
_IN_ORDER = platform.machine() in ("x86_64", "AMD64", "i386", "i686")


def fence() -> None:
    """Complete this thread's reads and writes before any later ones.

    Call it between some bytes and the mark that announces them: in the process that writes both, and in the one that reads both.
    Where the processor reorders them (aarch64), releasing one lock and then taking another is a full barrier: nothing moves down
    past a release or up past an acquire, and an acquire does not move above an earlier release. A lock of its own blocks nobody.
    """
    if not _IN_ORDER:
        for _ in range(2):
            with threading.Lock():
                pass
