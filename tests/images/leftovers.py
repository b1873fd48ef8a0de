"""Find what loaders leave behind: open memories, and files of loader processes."""

import contextlib
import gc
import os
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock


def open_memories():
    gc.collect()  # those of earlier tests may be in reference cycles
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "torch_fastdet" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def closes(before):
    """Return whether no more memories are open than ``before``; threads of ended loaders may take a while to end."""
    end = time.monotonic() + 60
    while open_memories() > before and time.monotonic() < end:
        time.sleep(0.1)
    return open_memories() <= before


@contextlib.contextmanager
def started():
    """Yield the ids of the processes that are started inside the context."""
    numbers, start = [], BaseProcess.start

    def noting(process):
        start(process)
        numbers.append(process.pid)

    with mock.patch.object(BaseProcess, "start", noting):
        yield numbers


def orphans(numbers):
    """Return what ended processes among these left in /dev/shm; other tests' may be killed meanwhile."""
    ended = tuple(f"torch_{number}_" for number in numbers if not Path(f"/proc/{number}").exists())
    return [name for name in os.listdir("/dev/shm") if name.startswith(ended)]
