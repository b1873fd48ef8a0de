"""Files that are there whole or not at all: a checkpoint, and the file of ours that belongs to it.

The name of ours holds the checkpoint's checksum, ``last.0123456789abcdef.resume``, and it is written first. So whichever
checkpoint a killed process leaves, the file that belongs to it is there too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

MAGIC = b"torch_fastdet resume 1\n"
SUFFIX = ".resume"
#: In the checkpoint's folder, for the moment of writing. What a killed process leaves in it, the next one removes.
WRITING = ".torch_fastdet_writing"


class NotOurs(Exception):
    """There is no file that belongs to a checkpoint, or it is damaged: why, in a sentence."""


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to; it becomes ``path`` when the block ends well. Before, or if the block fails, ``path`` stays what it was."""
    folder = path.parent / WRITING
    folder.mkdir(exist_ok=True)
    made = folder / path.name  # torch.save writes the file's name into the file
    try:
        yield made
        _to_disk(made)
        os.replace(made, path)
        _to_disk(path.parent)
    finally:
        made.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _to_disk(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_checkpoint(path: Path, write: Callable[[Path], object], state: Callable[[], dict[str, object]]) -> Any:
    """Write a checkpoint by ``write(path)``, and first the file of ours that belongs to it.

    Args:
        path: of the checkpoint.
        write: writes it to the path that it gets.
        state: what the file of ours holds: tensors, numbers, texts and None, in lists, tuples and dictionaries.

    Returns:
        What ``write`` returns.
    """
    with whole(path) as made:
        # By a process that was killed. What cannot be removed, such as an open file on NFS, is no reason to save nothing.
        for left in made.parent.iterdir():
            with contextlib.suppress(OSError):
                left.unlink()
        result = write(made)
        with open(made, "rb") as file:
            digest = _digest(file)
        ours = _beside(path, digest)
        with whole(ours) as temporary:
            _write(temporary, digest, state())
    forget(path, but=ours)
    return result


def _digest(file: BinaryIO) -> str:
    found = hashlib.sha256()
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()


def _beside(path: Path, digest: str) -> Path:
    return path.with_name(f"{path.stem}.{digest[:16]}{SUFFIX}")


def _write(path: Path, digest: str, state: dict[str, object]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getbuffer()
    with open(path, "wb") as file:
        file.write(MAGIC + bytes.fromhex(digest) + hashlib.sha256(payload).digest())
        file.write(payload)


def forget(path: Path, but: Path | None = None) -> None:
    """Remove the files of ours beside a checkpoint, ``but`` one."""
    for other in path.parent.glob(f"{path.stem}.{'[0-9a-f]' * 16}{SUFFIX}"):
        if other != but:
            other.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """What the file that belongs to the checkpoint ``path`` holds, with its tensors on the CPU. It runs no code of the file.

    Raises:
        NotOurs: there is no such file, or it is damaged.
    """
    with open(path, "rb") as file:
        digest = _digest(file)
    ours = _beside(path, digest)
    try:
        data = memoryview(ours.read_bytes())
    except FileNotFoundError:
        others = any(path.parent.glob(f"{path.stem}.{'[0-9a-f]' * 16}{SUFFIX}"))
        reason = "belongs to another checkpoint" if others else "is not there"
        raise NotOurs(f"the file {ours.name} beside {path.name} {reason}.") from None
    head = len(MAGIC)
    if bytes(data[:head]) != MAGIC or bytes(data[head : head + 32]).hex() != digest:
        raise NotOurs(f"{ours.name} is not a file of resume_exact for {path.name}.")
    payload = data[head + 64 :]
    if hashlib.sha256(payload).digest() != bytes(data[head + 32 : head + 64]):
        raise NotOurs(f"{ours.name} is damaged.")
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:
        raise NotOurs(f"{ours.name} cannot be read: {type(error).__name__}.") from None
    if not isinstance(state, dict):
        raise NotOurs(f"{ours.name} holds no state.")
    return state
