"""Shares images between all processes of a data loader: decoded ones, or files that the GPU decodes.

The memory is an anonymous file (``memfd``), of which nothing is left however a process ends. Every image has its place from the start,
because the label scan knows the sizes. Whoever decodes an image first writes it, then sets its mark.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import multiprocessing.context
import multiprocessing.reduction
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torch_fastdet._say import warn
from torch_fastdet.images.fence import fence
from torch_fastdet.images.jpeg_files import CHANNELS, Files, Wanted, pack_jpeg, packed_size
from torch_fastdet.memory import HOST_BUDGET, Owner, is_low, register
from torch_fastdet.patching.protocols import Names

ALIGNMENT = 64


class SharedFile(Owner):
    """Map an anonymous file that processes share: a head, and bytes behind it."""

    label: str
    #: The attributes that other processes and copies get.
    kept: tuple[str, ...]
    budget = HOST_BUDGET
    #: The number of bytes behind the head.
    nbytes: int
    pixels: np.ndarray
    #: Opens an existing file or a new one, and reads its head.
    _map: Callable[[int | None], None]

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
        return everything[:head]

    def fileno(self) -> int:
        assert self._fd is not None
        return self._fd

    def tensor(self) -> torch.Tensor:
        """Return all bytes behind the head as one tensor, on the CPU; offsets are positions in it."""
        return torch.from_numpy(self.pixels)

    def __del__(self) -> None:
        # The mapping itself is freed with the last array or tensor that refers to it.
        fd = getattr(self, "_fd", None)
        if fd is not None:
            os.close(fd)

    def _is_full(self) -> bool:
        """Return whether nothing more is to be kept: the host's memory was low once. It is looked at each sixteenth time."""
        self._asked += 1
        if not self._full and self._asked % 16 == 1:
            self._full = is_low()
        return self._full

    def _begin(self, fd: int | None) -> None:
        """Map the file, and count it among the owners: another thread may ask it what it holds from then on."""
        self._map(fd)
        register(self)

    def __getstate__(self) -> Names:
        kept = {name: getattr(self, name) for name in self.kept}
        # A spawned process gets this file. A copy of the data set (deepcopy, a pickle on disk) gets its own.
        spawning = multiprocessing.context.get_spawning_popen() is not None
        return {**kept, "fd": multiprocessing.reduction.DupFd(self.fileno()) if spawning else None}

    def __setstate__(self, state: Names) -> None:
        fd = state.pop("fd")
        self.__dict__.update(state)
        self._begin(None if fd is None else fd.detach())


class ImageMemory(SharedFile):
    """Keep a place for each image, as far as ``budget`` bytes go; ``shapes`` are (height, width) as it will be kept, or somewhat more.

    ``fd`` is the file of such a memory in another process, which is taken over. ``jpegs`` keeps files instead of images, as far as it can:
    their images have places behind all others.
    """

    what, label = "decoded images", "torch_fastdet_images"
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
        self._begin(fd)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def places(self) -> int:
        return int((self.offsets >= 0).sum())

    def held(self) -> int:
        if self.jpegs is None:
            return self.nbytes
        # Nearly all files are kept as such, so further data sets may use the memory that the places of their images would take.
        sizes = self.shapes.prod(1) * CHANNELS
        return int(sizes[(self.offsets >= 0) & (self.decoded() | ~self.jpegs.may_keep)].sum())

    def used(self) -> int:
        return int(self.sizes(np.flatnonzero(self.decoded())).sum())

    def has(self, index: int) -> bool:
        """Return whether the image is there, decoded or as a file."""
        return self.is_decoded(index) or (self.jpegs is not None and self.jpegs.has(index))

    @property
    def files(self) -> JpegFiles:
        assert self.jpegs is not None
        return self.jpegs

    def read(self, index: int) -> bool:
        return self.jpegs is not None and self.jpegs.read(index)

    def is_file(self, index: int) -> bool:
        return not self.is_decoded(index) and self.jpegs is not None and self.jpegs.has(index)

    def take_sent(self) -> dict[int, np.ndarray]:
        """Return files that are to travel with the batch, by their index. They are not needed here any more."""
        if self.jpegs is None:
            return {}
        sent, self.jpegs.sent = self.jpegs.sent, {}
        return sent

    def is_decoded(self, index: int) -> bool:
        return bool(self.decoded(index))

    def decoded(self, indices: int | slice | np.ndarray = slice(None)) -> Any:
        """Return whether an image is there, decoded, or for each of some: a copy, because other processes set marks meanwhile."""
        marked = self._marks[indices] != 0
        fence()
        return marked

    def get(self, index: int) -> np.ndarray | None:
        """Return the image, a view into the memory that nobody may write to, or decoded from its file; None where it is not there."""
        if not self.is_decoded(index):
            return self.files.decode(index, self.shapes[index]) if self.is_file(index) else None
        height, width = self.shape(index)
        start = int(self.offsets[index])
        image = self.pixels[start : start + height * width * CHANNELS].reshape(height, width, CHANNELS)
        image.flags.writeable = False
        return image

    def shape(self, index: int) -> tuple[int, int]:
        """Return (height, width) of an image that is there."""
        height, width = (self._sizes[index, :2] if self.is_decoded(index) else self.shapes[index]).tolist()
        return height, width

    def shapes_of(self, indices: np.ndarray) -> np.ndarray:
        """Return (height, width) of images that are there."""
        files = ~self.decoded(indices)
        found = self._sizes[indices, :2].astype(np.int64)
        if self.jpegs is not None:
            found[files] = self.shapes[indices[files]]
        return found

    def original(self, index: int) -> tuple[int, int]:
        """Return (height, width) of its file's image, before it was resized."""
        of_file = self.jpegs is not None and not self.is_decoded(index)
        height, width = (self.files.files.sizes[index] if of_file else self._sizes[index, 2:]).tolist()
        return height, width

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        return self.shapes_of(indices).prod(1) * CHANNELS

    def put(self, index: int, image: np.ndarray, original: tuple[int, int]) -> bool:
        """Keep an image. False where it has no place, is larger than announced, or memory runs low."""
        start, room = int(self.offsets[index]), int(self.shapes[index].prod()) * CHANNELS
        if start < 0 or image.dtype != np.uint8 or image.shape[2:] != (CHANNELS,) or image.size > room:
            return False
        if not self.has(index):
            if self._is_full():
                return False
            # Two processes may write the same image at once, but they write the same bytes.
            self.pixels[start : start + image.size] = image.reshape(-1)
            self._sizes[index] = (*image.shape[:2], *original)
            fence()
            self._marks[index] = 1
        return True

    def load(
        self, load_image: Callable[..., tuple], index: int, *args: object, **kwargs: object
    ) -> tuple[np.ndarray, tuple[int, int], tuple[int, ...]]:
        """Return what ``load_image``, a framework's own, returns: image, original size, size; it is called where the image is not there."""
        if not self.has(index):
            image, original, size = load_image(index, *args, **kwargs)
            if not self.put(index, image, original):
                return image, original, size
        image = self.get(index)
        assert image is not None
        return image, self.original(index), image.shape[:2]

    def _map(self, fd: int | None) -> None:
        n = len(self.shapes)
        sizes = -(-n // ALIGNMENT) * ALIGNMENT
        head = self._open(sizes + n * 16, fd)
        self._marks = head[:n]
        #: Columns are height and width of the image, and those of its file.
        self._sizes = head[sizes : sizes + n * 16].view(np.int32).reshape(n, 4)


class JpegFiles(SharedFile):
    """Keep JPEG files with an index (:func:`torch_fastdet.ops.jpeg_pack`), one after another in the order in which they are first needed.

    A file for which ``budget`` has no room is read for each batch and travels with it. ``fd`` and ``nbytes`` are those of such a memory in
    another process.
    """

    what, label = "JPEG files", "torch_fastdet_jpegs"
    kept = "files", "may_keep", "nbytes"
    _rows: np.ndarray
    _told = 0

    def __init__(self, files: Files, budget: int, fd: int | None = None, nbytes: int | None = None) -> None:
        self.files = files
        self.may_keep = np.array([bool(path) for path in files.paths], dtype=bool)
        self.nbytes = min(budget, packed_size(files)) if nbytes is None else nbytes
        self._begin(fd)

    def __len__(self) -> int:
        return len(self.files.paths)

    def held(self) -> int:
        return self.nbytes

    def used(self) -> int:
        return int(self._rows[len(self), 0])

    def has(self, index: int) -> bool:
        return self._place(index)[0] > 0 or index in self.sent

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Return (n, 2) int64 of files that are kept: bytes and offset."""
        return np.stack(self._place(indices), 1)

    def _place(self, index: int | np.ndarray) -> tuple[Any, Any]:
        """Return bytes and offset. The offset is the one of these bytes, or of another copy of them."""
        size = self._rows[index, 0]
        fence()
        offset = self._rows[index, 1]
        fence()
        return size, offset

    def read(self, index: int) -> bool:
        """Read an image's file unless it is there, and return whether it is: kept, or for the batch that is planned.

        OpenCV has to decode the others.
        """
        if self._rows[index, 0] or index in self.sent:
            return self.has(index)
        if not self.may_keep[index]:
            return False
        try:
            found = pack_jpeg(np.fromfile(self.files.paths[index], dtype=np.uint8))
        except OSError:
            return False  # now: the framework's own code tries, and raises its own error
        if isinstance(found, str):
            self._refuse(index, found)
            return False
        packed, size = found
        if size != tuple(self.files.sizes[index]):
            self._refuse(index, "its size has changed")
            return False
        offset = None if self._is_full() else self._take(packed.nbytes)
        if offset is None:
            self._full = True
            self.sent[index] = packed
        else:
            self._write(index, offset, packed)  # two processes may read one file at once: either copy is right
        return True

    def _write(self, index: int, offset: int, data: np.ndarray) -> None:
        self.pixels[offset : offset + data.nbytes] = data
        fence()
        self._rows[index, 1] = offset
        fence()
        self._rows[index, 0] = data.nbytes

    def packed(self, index: int) -> np.ndarray:
        if index in self.sent:
            return self.sent[index]
        size, offset = self._place(index)
        return self.pixels[offset : offset + size]

    def decode(self, index: int, kept: np.ndarray) -> np.ndarray:
        """Return the image of a file that is there, resized to ``kept`` (height, width), made on the CPU."""
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
            warn(f"loader_optim: OpenCV decodes {self.files.paths[index]}, and other files like it: {reason}")

    @property
    def refused(self) -> int:
        """Return how many files were not kept because OpenCV has to decode them, so far."""
        return int(self._rows[len(self), 1])

    def newly_refused(self) -> int:
        """Return how many of them since this process asked last."""
        before, self._told = self._told, self.refused
        return self._told - before

    def _take(self, size: int) -> int | None:
        """Return the offset of so many bytes that nobody else gets; None where there is no room."""
        with self._locked():
            begin = aligned(int(self._rows[len(self), 0]))
            if begin + size > self.nbytes:
                return None
            self._rows[len(self), 0] = begin + size
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
        #: Holds packed files that are sent with the batch that this process plans.
        self.sent: dict[int, np.ndarray] = {}
        # Each image has a row: bytes (0: missing, -1: refused; written last) and offset. The last row has the bytes of all files and the
        # number of refused ones.
        n = len(self) + 1
        self._rows = self._open(n * 16, fd)[: n * 16].view(np.int64).reshape(n, 2)


def aligned(end: int) -> int:
    """Return the next aligned offset from ``end`` on."""
    return -(-end // ALIGNMENT) * ALIGNMENT


def hand_out(shapes: np.ndarray, budget: int, order: np.ndarray | None = None) -> tuple[np.ndarray, int]:
    """Return the offset of each image (-1: none), handed out in this order, and the bytes of all."""
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
