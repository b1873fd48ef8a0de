"""Pictures in memory that all processes of a data loader share: decoded, or as files that the GPU decodes.

The memory is an anonymous file (``memfd``): it has no name, so nothing is left behind however a process ends, and the size
of ``/dev/shm`` does not matter. Every picture has its place from the start, because the label scan knows the sizes; pages
are taken when a picture is written. Whoever decodes a picture first writes it, then sets its mark.

With :class:`JpegFiles`, files take the budget first, and a picture is decoded into its place only where OpenCV has to decode it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import multiprocessing.context
import multiprocessing.reduction
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torch_fastdet import ops
from torch_fastdet._say import say
from torch_fastdet.images.jpeg import CHANNELS, Files, Wanted, pack_jpeg, packed_size
from torch_fastdet.images.slots import SendBuffer
from torch_fastdet.memory import HOST_BUDGET, Owner, is_low, register

ALIGNMENT = 64


class SharedFile(Owner):
    """An anonymous file that processes share, mapped: a head, and bytes behind it."""

    label: str
    #: Attributes that go to other processes and copies.
    kept: tuple[str, ...]
    budget = HOST_BUDGET
    #: Bytes behind the head.
    nbytes: int
    pixels: np.ndarray

    def _open(self, head: int, fd: int | None) -> np.ndarray:
        """Map the file ``fd``, or a new one, and return its head."""
        head = -(-head // mmap.PAGESIZE) * mmap.PAGESIZE
        if fd is None:
            fd = os.memfd_create(self.label, os.MFD_CLOEXEC)
            os.ftruncate(fd, head + self.nbytes)
        self._fd: int | None = fd
        everything = np.frombuffer(mmap.mmap(fd, head + self.nbytes), dtype=np.uint8)
        self.pixels = everything[head:]
        self._asked, self._full = 0, False
        register(self)
        return everything[:head]

    def fileno(self) -> int:
        assert self._fd is not None
        return self._fd

    def tensor(self) -> torch.Tensor:
        """All bytes behind the head as one tensor, on the CPU; offsets are positions in it."""
        return torch.from_numpy(self.pixels)

    def __del__(self) -> None:
        # The mapping itself goes with the last array or tensor that looks into it.
        fd = getattr(self, "_fd", None)
        if fd is not None:
            os.close(fd)

    def _is_full(self) -> bool:
        """Whether nothing more is to be kept: the host's memory was low once. It is looked at each sixteenth time."""
        self._asked += 1
        if not self._full and self._asked % 16 == 1:
            self._full = is_low()
        return self._full

    def _map(self, fd: int | None) -> None:
        """Open the file ``fd``, or a new one, and look into its head."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in self.kept}
        # For a process that is spawned. A copy of the data set (deepcopy, a file) gets a file of its own.
        spawning = multiprocessing.context.get_spawning_popen() is not None
        return {**kept, "fd": multiprocessing.reduction.DupFd(self.fileno()) if spawning else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fd = state.pop("fd")
        self.__dict__.update(state)
        self._map(None if fd is None else fd.detach())


class PictureMemory(SharedFile):
    """A place for each of ``n`` pictures, as far as a budget goes.

    Args:
        shapes: (height, width) of each picture as it will be kept, or somewhat more.
        budget: bytes that pictures may take.
        fd: the file of such a memory in another process, with the same shapes and budget; it is taken over.
        jpegs: keeps files in place of pictures, as far as it can. Their pictures have places, too, but behind all others.
    """

    what, label = "decoded pictures", "torch_fastdet_pictures"
    kept = "shapes", "offsets", "nbytes", "jpegs"

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]] | np.ndarray,
        budget: int,
        fd: int | None = None,
        jpegs: JpegFiles | None = None,
    ) -> None:
        self.shapes = np.asarray(shapes, dtype=np.int64).reshape(-1, 2)
        self.jpegs = jpegs
        order = None if jpegs is None else np.argsort(jpegs.may_keep, kind="stable")
        self.offsets, self.nbytes = hand_out(self.shapes, budget, order)
        self._map(fd)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def places(self) -> int:
        """How many pictures have a place."""
        return int((self.offsets >= 0).sum())

    def held(self) -> int:
        if self.jpegs is None:
            return self.nbytes
        # Few files are not kept as such: what the places of the others may take is not held back from further data sets.
        sizes = self.shapes.prod(1) * CHANNELS
        return int(sizes[(self.offsets >= 0) & ((self._marks != 0) | ~self.jpegs.may_keep)].sum())

    def used(self) -> int:
        return int(self.sizes(np.flatnonzero(self._marks)).sum())

    def has(self, index: int) -> bool:
        """Whether the picture is there, decoded or as a file."""
        return bool(self._marks[index]) or (self.jpegs is not None and self.jpegs.has(index))

    @property
    def files(self) -> JpegFiles:
        assert self.jpegs is not None
        return self.jpegs

    def read(self, index: int) -> bool:
        """Keep a picture's file, if that is to be kept. Whether it is there."""
        return self.jpegs is not None and self.jpegs.read(index)

    def is_file(self, index: int) -> bool:
        return not self._marks[index] and self.jpegs is not None and self.jpegs.has(index)

    def packed(self, index: int) -> np.ndarray | None:
        """The packed file of a picture that is not decoded."""
        return None if self._marks[index] or self.jpegs is None else self.jpegs.packed(index)

    def take_sent(self) -> tuple[Any, np.ndarray]:
        """Files that are to travel with the batch: their bytes, and (k, 3) index, bytes, offset of each."""
        if self.jpegs is None:
            return np.empty(0, dtype=np.uint8), np.empty((0, 3), dtype=np.int64)
        return self.jpegs.take_sent()

    def forget_sent(self) -> None:
        """The batch is made: what travels with it is not needed here any more."""
        if self.jpegs is not None:
            self.jpegs.forget_sent()

    def decoded(self) -> np.ndarray:
        """For each picture whether it is there, decoded."""
        return self._marks != 0

    def get(self, index: int) -> np.ndarray | None:
        """The picture, a view into the memory, or decoded from its file; None where it is not there."""
        if not self._marks[index]:
            return self.files.decode(index, self.shapes[index]) if self.is_file(index) else None
        height, width = self.shape(index)
        start = int(self.offsets[index])
        return self.pixels[start : start + height * width * CHANNELS].reshape(height, width, CHANNELS)

    def shape(self, index: int) -> tuple[int, int]:
        """(height, width) of a picture that is there."""
        height, width = (self._sizes[index, :2] if self._marks[index] else self.shapes[index]).tolist()
        return height, width

    def shapes_of(self, indices: np.ndarray) -> np.ndarray:
        """(height, width) of pictures that are there."""
        found = self._sizes[indices, :2].astype(np.int64)
        if self.jpegs is not None:
            files = self._marks[indices] == 0
            found[files] = self.shapes[indices[files]]
        return found

    def original(self, index: int) -> tuple[int, int]:
        """(height, width) of its file's picture, before it was resized."""
        of_file = self.jpegs is not None and not self._marks[index]
        height, width = (self.files.files.sizes[index] if of_file else self._sizes[index, 2:]).tolist()
        return height, width

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """Bytes of pictures that are there."""
        return self.shapes_of(indices).prod(1) * CHANNELS

    def put(self, index: int, picture: np.ndarray, original: tuple[int, int]) -> bool:
        """Keep a picture. False where it has no place, is larger than announced, or memory runs low."""
        start, room = int(self.offsets[index]), int(self.shapes[index].prod()) * CHANNELS
        if start < 0 or picture.dtype != np.uint8 or picture.shape[2:] != (CHANNELS,) or picture.size > room:
            return False
        if not self.has(index):
            if self._is_full():
                return False
            # Two processes may write the same picture at once: the same bytes.
            self.pixels[start : start + picture.size] = picture.reshape(-1)
            self._sizes[index] = (*picture.shape[:2], *original)
            self._marks[index] = 1
        return True

    def load(self, load_image: Callable[..., tuple], index: int, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """What ``load_image``, a host's own, returns: picture, original size, size; it is called where the picture is not there."""
        if not self.has(index):
            picture, original, size = load_image(index, *args, **kwargs)
            if not self.put(index, picture, original):
                return picture, original, size
        picture = self.get(index)
        assert picture is not None
        return picture, self.original(index), picture.shape[:2]

    def _map(self, fd: int | None) -> None:
        n = len(self.shapes)
        sizes = -(-n // ALIGNMENT) * ALIGNMENT
        head = self._open(sizes + n * 16, fd)
        self._marks = head[:n]
        #: height, width, and those of the file
        self._sizes = head[sizes : sizes + n * 16].view(np.int32).reshape(n, 4)


class JpegFiles(SharedFile):
    """JPEG files with an index (:func:`torch_fastdet.ops.jpeg_pack`), one after another in the order in which they are first needed.

    A file for which there is no room is read for each batch and travels with it, as it is: who makes the batch packs it. Its index is
    kept: behind the budget, as it takes 3% of a file.

    Args:
        files: those of a data set.
        budget: bytes that files may take.
        fd: the file of such a memory in another process, with the same files and budget, and ``nbytes``; it is taken over.
        nbytes: bytes of files and indices together.
    """

    what, label = "JPEG files", "torch_fastdet_jpegs"
    kept = "files", "may_keep", "wanted", "room", "nbytes"
    _rows: np.ndarray
    _told: int

    def __init__(self, files: Files, budget: int, fd: int | None = None, nbytes: int | None = None) -> None:
        self.files = files
        self.may_keep = np.array([bool(path) for path in files.paths], dtype=bool)
        self.wanted = packed_size(files) if nbytes is None else nbytes
        self.room = min(budget, self.wanted)
        heads = int(files.beside()[self.may_keep].sum()) if self.room < self.wanted else 0
        self.nbytes = self.room + heads if nbytes is None else nbytes
        self._map(fd)

    def __len__(self) -> int:
        return len(self.files.paths)

    def held(self) -> int:
        return self.room

    def used(self) -> int:
        return int(self._rows[len(self), 0])

    def has(self, index: int) -> bool:
        return bool(self._rows[index, 0] > 0) or index in self.sent

    def rows(self, indices: np.ndarray | int) -> np.ndarray:
        """(..., 2) int64 of files that are kept: bytes and offset."""
        return self._rows[indices, :2]

    def read(self, index: int) -> bool:
        """Read a picture's file unless it is there. Whether it is there: kept, or for the batch that is planned.

        It is not where OpenCV has to decode it, because :func:`~torch_fastdet.ops.jpeg_pack` refuses it. One that has not changed
        since it was judged is not judged again.
        """
        kept, _, head, _, *judged = self._rows[index].tolist()
        if kept or index in self.sent:
            return self.has(index)
        if not self.may_keep[index]:
            return False
        try:
            file, stamp = self._read(self.files.paths[index])
        except OSError as error:
            self._refuse(index, str(error))
            return False
        if head and stamp == judged:
            self._send(index, file.nbytes)
            return True
        found = pack_jpeg(file, self._head(index))
        if isinstance(found, str) or found.size != tuple(self.files.sizes[index]):
            self._refuse(index, found if isinstance(found, str) else "its size has changed")
            return False
        packed = found.data
        offset = None if self._is_full() else self._take(0, packed.nbytes, self.room)
        if offset is not None:
            self._write(index, 0, offset, packed)  # two processes may read one file at once: either copy is right
            return True
        self._full = True
        self._send(index, file.nbytes)
        if not head:
            begin = self._take(2, found.head, self.nbytes - self.room)
            if begin is not None and not is_low():
                self._write(index, 2, self.room + begin, packed[: found.head])
        self._rows[index, 4:] = stamp
        return True

    def _read(self, path: str) -> tuple[np.ndarray, list[int]]:
        """A file, behind those that travel with the batch, and what tells whether it has changed: its size, and when it did last."""
        fd = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(fd)
            file, size = self._buffer.behind(status.st_size), 0
            while count := os.readv(fd, [file[size:].data]):
                size += count
        finally:
            os.close(fd)
        return file[:size], [status.st_size, status.st_ctime_ns]

    def _send(self, index: int, size: int) -> None:
        """Let a file that was just read travel with the batch."""
        self.sent[index] = size, self._buffer.end
        self._buffer.end += size

    def take_sent(self) -> tuple[Any, np.ndarray]:
        """Files that are to travel with the batch: their bytes, and (k, 3) index, bytes, offset of each."""
        files = [(index, *where) for index, where in self.sent.items()]
        self.sent.clear()
        return self._buffer.take(), np.array(files, dtype=np.int64).reshape(-1, 3)

    def forget_sent(self) -> None:
        """The batch is made."""
        self.sent.clear()
        self._buffer.end = 0

    def _head(self, index: int) -> np.ndarray | None:
        """What an earlier pass over a file that is not kept has found."""
        size, begin = self._rows[index, 2:4].tolist()
        return self.pixels[begin : begin + size] if size else None

    def _write(self, index: int, column: int, offset: int, data: np.ndarray) -> None:
        self.pixels[offset : offset + data.nbytes] = data
        self._rows[index, column + 1] = offset
        self._rows[index, column] = data.nbytes

    def packed(self, index: int) -> np.ndarray:
        """A file that is there."""
        if index in self.sent:
            return self.pack(np.array([[index, *self.sent[index]]]), torch.from_numpy(self._buffer.bytes))[0].numpy()
        size, offset = self.rows(index).tolist()
        return self.pixels[offset : offset + size]

    def pack(self, files: np.ndarray, sent: torch.Tensor, pin_memory: bool = False) -> tuple[torch.Tensor, np.ndarray]:
        """Files that travel with a batch, packed, and (n, 2) bytes and offset of each. ``files``: index, bytes, offset in ``sent``."""
        nothing = np.empty(0, dtype=np.uint8)
        heads = [nothing if (head := self._head(index)) is None else head for index in files[:, 0].tolist()]
        as_they_are = [sent[begin : begin + size] for _, size, begin in files.tolist()]
        storage, table, refusals = ops.jpeg_pack(as_they_are, pin_memory, [*map(torch.from_numpy, heads)])
        pictures = table.numpy()
        changed = (pictures[:, 2:4] != self.files.sizes[files[:, 0]]).any(1)  # refused ones have no size
        for row in np.flatnonzero(changed).tolist():
            why = refusals[row] or "it has another size"
            raise RuntimeError(f"{self.files.paths[files[row, 0]]} has changed while it was read: {why}")
        return storage, pictures[:, 1::-1]

    def decode(self, index: int, kept: np.ndarray) -> np.ndarray:
        """The picture of a file that is there, resized to ``kept`` (height, width), made on the CPU."""
        storage, out = torch.from_numpy(self.packed(index)), torch.empty(int(kept.prod()) * CHANNELS, dtype=torch.uint8)
        zero, seen = np.zeros(1, dtype=np.int64), np.array([[0, 0, kept[1], kept[0]]])
        sizes, ways = self.files.sizes[[index]], self.files.ways[[index]]
        Wanted(zero, zero, sizes, kept[None], ways, seen).decode(out, storage, storage)
        return out.numpy().reshape(*kept, CHANNELS)

    def _refuse(self, index: int, reason: str) -> None:
        self._rows[index, 0] = -1
        with self._locked():
            first = self._rows[len(self), 1] == 0
            self._rows[len(self), 1] += 1
        if first:
            say(
                f"loader_optim: OpenCV decodes {self.files.paths[index]}, and other files like it: {reason}",
                logging.WARNING,
            )

    @property
    def refused(self) -> int:
        """How many files were not kept because OpenCV has to decode them, so far."""
        return int(self._rows[len(self), 1])

    def newly_refused(self) -> int:
        """How many of them since this process asked last."""
        before, self._told = self._told, self.refused
        return self._told - before

    def _take(self, column: int, size: int, room: int) -> int | None:
        """The offset of so many bytes that nobody else gets, of ``room`` whose end is noted in the last row."""
        with self._locked():
            begin = aligned(int(self._rows[len(self), column]))
            if begin + size > room:
                return None
            self._rows[len(self), column] = begin + size
            return begin

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.lockf(self.fileno(), fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.fileno(), fcntl.LOCK_UN)

    def _map(self, fd: int | None) -> None:
        self._lock = threading.Lock()
        #: Bytes and offset of files that travel with the batch that this process plans.
        self.sent: dict[int, tuple[int, int]] = {}
        self._told = 0
        self._buffer = SendBuffer()
        # A row a picture: bytes (0: not there, -1: refused; written last) and offset; the same of the index of one that is not
        # kept, and the file's size and time when it was judged. Behind them: bytes that files take, files that were refused,
        # bytes that indices take.
        n = len(self) + 1
        self._rows = self._open(n * 48, fd)[: n * 48].view(np.int64).reshape(n, 6)


def aligned(end: int) -> int:
    """The next aligned offset from ``end`` on."""
    return -(-end // ALIGNMENT) * ALIGNMENT


def hand_out(shapes: np.ndarray, budget: int, order: np.ndarray | None = None) -> tuple[np.ndarray, int]:
    """The offset of each picture (-1: none), handed out in this order, and the bytes of all."""
    offsets = np.full(len(shapes), -1, dtype=np.int64)
    end = 0
    sizes = (shapes.prod(1) * CHANNELS).tolist()
    for index in range(len(sizes)) if order is None else order.tolist():
        size = sizes[index]
        start = aligned(end)
        if size and start + size <= budget:
            offsets[index] = start
            end = start + size
    return offsets, end
