"""One memory for all ranks of a training on one machine.

The first rank makes it and hands its file over a socket in Linux's abstract namespace: such sockets have no file, so nothing
is left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from torch_fastdet._say import say
from torch_fastdet.images.jpeg import AS_IT_IS, Files
from torch_fastdet.images.memory import JpegFiles, PictureMemory, hand_out
from torch_fastdet.memory import UNLIMITED, words

#: How long the first rank waits for the others, and they for it, in seconds. It makes its data set before they start.
OFFERED_FOR = 600.0
WAIT = 5.0


def local_ranks() -> tuple[int, int]:
    """(rank, number of ranks) on this machine."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (int(os.environ.get("LOCAL_RANK", "0")), size) if size > 1 else (0, 1)


def shared_by_ranks(
    what: Iterable[str],
    shapes: Sequence[tuple[int, int]] | np.ndarray,
    budget: int,
    files: Files | None = None,
    on_gpu: bool = True,
) -> PictureMemory:
    """A memory for the data set that ``what`` describes: one of its own, or in a distributed run the first rank's.

    Args:
        what: says which data set it is, in which size.
        shapes: (height, width) of each picture as it will be kept, or somewhat more.
        budget: bytes that pictures and files may take.
        files: the JPEG files that may stand for decoded pictures.
        on_gpu: a GPU decodes them, so they take the budget first; else decoded pictures do, and other files are read for each batch.
    """
    rank, size = local_ranks()
    if size == 1:
        return _memory(shapes, budget, files, on_gpu)
    name = _name(what)
    if rank == 0:
        memory = _memory(shapes, budget, files, on_gpu)
        _offer(memory, name, size - 1)
        return memory
    taken = _take(name, WAIT)
    if taken is not None:
        (pictures, room, of_files), fds = taken
        files = files or Files.of([""] * len(shapes), list(shapes), [AS_IT_IS] * len(shapes))
        files = files if on_gpu else _without_place(files, shapes, pictures)
        jpegs = JpegFiles(files, room, fds[1], of_files) if len(fds) > 1 else None
        return PictureMemory(shapes, pictures, fds[0], jpegs)
    memory = _memory(shapes, budget if budget == UNLIMITED else budget // size, files, on_gpu)
    say(
        f"loader_optim: rank {os.environ.get('RANK', rank)} did not get the pictures of its machine's first rank within "
        f"{WAIT:g} s and decodes its own, into {words(memory.nbytes)}",
        level=logging.WARNING,
        every_rank=True,
    )
    return memory


def _memory(
    shapes: Sequence[tuple[int, int]] | np.ndarray, budget: int, files: Files | None, on_gpu: bool
) -> PictureMemory:
    if files is not None and not on_gpu:
        files = _without_place(files, shapes, budget)
    if files is None or not any(files.paths):
        return PictureMemory(shapes, budget)
    jpegs = JpegFiles(files, budget if on_gpu else 0)
    return PictureMemory(shapes, budget - jpegs.room, jpegs=jpegs)


def _without_place(files: Files, shapes: Sequence[tuple[int, int]] | np.ndarray, budget: int) -> Files:
    """Those of pictures that find no place when they are decoded."""
    offsets, _ = hand_out(np.asarray(shapes, dtype=np.int64).reshape(-1, 2), budget)
    paths = ["" if place >= 0 else path for place, path in zip(offsets.tolist(), files.paths, strict=True)]
    return Files(paths, files.sizes, files.ways)


def _name(what: Iterable[str]) -> bytes:
    run = (os.environ.get(key, "") for key in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))
    text = "\n".join([str(os.getuid()), *run, *what])
    return b"\0torch_fastdet_" + hashlib.sha256(os.fsencode(text)).hexdigest().encode()


def _same_user(connection: socket.socket) -> bool:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", data)[1] == os.getuid()


def _offer(memory: PictureMemory, name: bytes, times: int) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
    except OSError:  # an earlier data set of the same pictures is offered still
        listener.close()
        return
    listener.listen(times)
    listener.settimeout(OFFERED_FOR)
    jpegs = memory.jpegs
    fds = [os.dup(file.fileno()) for file in (memory, jpegs) if file is not None]
    budgets = struct.pack("3q", memory.nbytes, *((0, 0) if jpegs is None else (jpegs.room, jpegs.nbytes)))

    def serve() -> None:
        left = times
        with listener:
            try:
                while left:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):  # a rank that has ended meanwhile
                        if _same_user(connection):
                            left -= 1
                            socket.send_fds(connection, [budgets], fds)
            except OSError:  # nobody came
                pass
            finally:
                for fd in fds:
                    os.close(fd)

    threading.Thread(target=serve, name="torch_fastdet_ranks", daemon=True).start()


def _take(name: bytes, wait: float) -> tuple[tuple[int, int, int], list[int]] | None:
    """What the first rank offers: bytes of pictures, of files, and of files with indices, and their memories' files.

    None where it offers nothing in time.
    """
    end = time.monotonic() + wait
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(wait)
            try:
                connection.connect(name)
                if _same_user(connection):
                    data, fds, _, _ = socket.recv_fds(connection, 24, 2)
                    if len(data) == 24 and fds:
                        return struct.unpack("3q", data), list(fds)
            except OSError:
                pass
        if time.monotonic() > end:
            return None
        time.sleep(0.05)
