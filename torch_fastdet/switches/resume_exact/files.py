"""Writes files that are there whole or not at all: a checkpoint, and the file of torch_fastdet that belongs to it.

That file's name holds the checkpoint's checksum, and it is written first: it is there for whichever checkpoint a killed process leaves.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

MAGIC = b"torch_fastdet resume 1\n"
SUFFIX = ".resume"
#: During a write, a folder exists beside the checkpoint whose name begins so.
WRITING = ".torch_fastdet_writing_"
#: If such a folder is so many seconds old, a killed process has left it. This counts where a lock does not show it, as on NFS.
LEFT_AFTER = 3600.0
#: A process surely locks the folder that it has made within so many seconds.
TO_LOCK = 1.0
T = TypeVar("T")
#: The parts of a training between two epochs.
State: TypeAlias = dict[str, Any]


class NotOurs(Exception):
    """Raise where there is no file that belongs to a checkpoint, or it is damaged: why, in a sentence."""


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes ``path`` when the block ends well. A symbolic link stays one: what it points at is replaced."""
    target = Path(os.path.realpath(path))
    folder = Path(tempfile.mkdtemp(prefix=WRITING, dir=target.parent))
    made = folder / path.name  # torch.save writes the file's name into the file
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield made
        if target.exists():
            shutil.copymode(target, made)
        _to_disk(made)
        os.replace(made, target)
        with contextlib.suppress(OSError):  # a file system that cannot sync a folder has the file nevertheless
            _to_disk(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_left(path: Path) -> None:
    """Remove what processes that are gone have left beside a checkpoint. A link is no such folder."""
    for left in Path(os.path.realpath(path)).parent.glob(f"{WRITING}*"):
        with contextlib.suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                age = time.time() - os.fstat(lock).st_mtime
                if age < LEFT_AFTER:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error where its process lives
                if age >= min(TO_LOCK, LEFT_AFTER):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _to_disk(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_checkpoint(path: Path, write: Callable[[Path], T], state: Callable[[], State]) -> T:
    """Write a checkpoint by ``write(path)``, and first the file with ``state()`` that belongs to it; returns what ``write`` returns."""
    _remove_left(path)
    with whole(path) as made:
        result = write(made)
        digest = _digest(made)
        ours = _beside(path, digest)
        with whole(ours) as temporary:
            _write(temporary, digest, state())
    forget(path, but=ours)
    return result


def _digest(path: Path) -> bytes:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.digest()


def _beside(path: Path, digest: bytes) -> Path:
    return path.with_name(f"{path.stem}.{digest.hex()[:16]}{SUFFIX}")


def _write(path: Path, digest: bytes, state: State) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getbuffer()
    with open(path, "wb") as file:
        file.write(MAGIC + digest + hashlib.sha256(payload).digest())
        file.write(payload)


def forget(path: Path, but: Path | None = None) -> None:
    """Remove the files of torch_fastdet beside a checkpoint, ``but`` one; with none, the training is over, and nothing half stays."""
    if but is None:
        _remove_left(path)
    for other in path.parent.glob(f"{path.stem}.{'[0-9a-f]' * 16}{SUFFIX}"):
        if other != but:
            other.unlink(missing_ok=True)


def read(path: Path) -> State:
    """Return the file that belongs to the checkpoint ``path``, with tensors on the CPU; raises NotOurs. It runs no code of the file."""
    digest = _digest(path)
    ours = _beside(path, digest)
    try:
        data = memoryview(ours.read_bytes())
    except FileNotFoundError:
        others = any(path.parent.glob(f"{path.stem}.{'[0-9a-f]' * 16}{SUFFIX}"))
        reason = "belongs to another checkpoint" if others else "is not there"
        raise NotOurs(f"the file {ours.name} beside {path.name} {reason}.") from None
    head = len(MAGIC) + len(digest)
    if data[:head] != MAGIC + digest:
        raise NotOurs(f"{ours.name} is not a file of resume_exact for {path.name}.")
    payload = data[head + 32 :]
    if hashlib.sha256(payload).digest() != data[head : head + 32]:
        raise NotOurs(f"{ours.name} is damaged.")
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:
        raise NotOurs(f"{ours.name} cannot be read: {type(error).__name__}.") from None
    if not isinstance(state, dict):
        raise NotOurs(f"{ours.name} holds no state.")
    return state
