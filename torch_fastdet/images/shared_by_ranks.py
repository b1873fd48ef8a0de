"""Shares one memory between all processes of a training that run on one machine.

They find each other by the store of their process group. The first that asks for a data set makes the memory and notes there where its
files are; the others open these under ``/proc``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from torch_fastdet._say import warn
from torch_fastdet._torch import private
from torch_fastdet._torch.private import group_size
from torch_fastdet.images.image_memory import ImageMemory, JpegFiles
from torch_fastdet.images.jpeg_files import Files

#: How long a process waits for the one that creates the memory, in seconds. The latter looks up the size of each file.
WAIT = 600.0


def shared_by_ranks(
    what: Iterable[str],
    shapes: Sequence[tuple[int, int]] | np.ndarray,
    budget: Callable[[], int],
    files: Files | None = None,
) -> ImageMemory | None:
    """Return a memory for the data set that ``what`` describes, in a distributed run the one of this machine; None if there is none.

    ``shapes`` are the images' (height, width) as they will be kept, or somewhat more, and ``files`` the JPEG files that may stand for
    them and take the budget first.
    """
    shapes = np.asarray(shapes, dtype=np.int64).reshape(-1, 2)

    def make(room: int) -> ImageMemory:
        jpegs = None if files is None or not any(files.paths) else JpegFiles(files, room)
        return ImageMemory(shapes, room if jpegs is None else room - jpegs.nbytes, jpegs=jpegs)

    def take(fds: list[int], room: int, *of_files: int) -> ImageMemory:
        jpegs = JpegFiles(files, 0, fds[1], of_files[0]) if files is not None and of_files else None
        return ImageMemory(shapes, room, fds[0], jpegs)

    try:
        if group_size() == 1:
            return make(budget() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        digest = hashlib.sha256(os.fsencode("\n".join(what))).hexdigest()
        # The images' places depend on whether files are kept, which may differ between ranks.
        kind = "decoded" if files is None else "files"
        return _of_machine(f"torch_fastdet/images/{_machine()}/{kind}/{digest}", lambda: make(budget()), take)
    except OSError as error:
        where = f" on rank {dist.get_rank()}" if group_size() > 1 else ""
        warn(
            f"loader_optim: the original loader runs{where}, because there is no memory to share: {error}",
            every_rank=True,
        )
        return None


def _machine() -> str:
    """Return what processes have in common that see each other under ``/proc``."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"


def _number() -> int:
    """Return this process's number under ``/proc``, which may be the one of another namespace."""
    return int(os.readlink("/proc/self"))


def _of_machine(name: str, make: Callable[[], ImageMemory], take: Callable[..., ImageMemory]) -> ImageMemory:
    """Return the memory of this name that another process has made and still has; else a new one, which others find."""
    store, turn = private.default_store(), 0
    while store.add(f"{name}/{turn}/asked", 1) > 1:
        process, files, sizes = _offer(store, f"{name}/{turn}")
        fds = _open(process, files)
        if fds:
            return take(fds, *sizes)
        turn += 1  # that memory has ended
    offer: tuple | None = None
    try:
        memory = make()
        kept = [file for file in (memory, memory.jpegs) if file is not None]
        offer = (
            _number(),
            [(file.fileno(), os.fstat(file.fileno()).st_ino) for file in kept],
            [file.nbytes for file in kept],
        )
        return memory
    finally:
        store.set(f"{name}/{turn}", json.dumps(offer))


def _offer(store: dist.Store, key: str) -> list:
    """Return process, files and sizes of a memory."""
    end = time.monotonic() + WAIT
    while not store.check([key]):  # store.wait() would not see Ctrl-C
        if time.monotonic() > end:
            raise OSError(f"the first rank of its machine has made none within {WAIT:g} s")
        time.sleep(0.05)
    offer = json.loads(store.get(key))
    if offer is None:
        raise OSError("the first rank of its machine got none")
    return offer


def _open(process: int, files: Sequence[tuple[int, int]]) -> list[int]:
    """Open these files of another process, of which number and inode are given; none where it has closed them."""
    fds: list[int] = []
    if process == _number():
        return fds
    try:
        with contextlib.ExitStack() as opened:
            for fd, inode in files:
                path = f"/proc/{process}/fd/{fd}"
                if os.stat(path).st_ino != inode:  # it may be a socket now, which cannot be opened
                    return []
                fds.append(os.open(path, os.O_RDWR))
                opened.callback(os.close, fds[-1])
                if os.fstat(fds[-1]).st_ino != inode:
                    return []
            opened.pop_all()
            return fds
    except FileNotFoundError:
        return []
