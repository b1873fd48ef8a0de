"""Keeps JPEG files instead of decoded images, which take ten times their memory: a GPU decodes what a batch shows of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from torch_fastdet import ops

SUFFIXES = (".jpg", ".jpeg")
CHANNELS = 3
#: A file takes at most these bytes more: its header and tables, and an index of 10 bytes for 256 pixels without subsampling.
BESIDE = 2048
INDEX = 10 / 256

#: How ``load_image`` resizes an image: as :func:`torch_fastdet.ops.image_resize_` names it, not at all, or in another way.
LINEAR, AREA, AS_IT_IS, OTHERWISE = 0, 1, -1, -2

#: Images that are decoded to be resized take at most this much memory at a time, unless one image takes more.
ROOM = 512 << 20
#: Resizing reads so many source pixels around a region: both neighbours of bilinear interpolation, and rounding.
MARGIN = 2


@dataclass
class Files:
    """Hold what is known of a data set's files before they are read."""

    #: "" for an image that is not kept as a file.
    paths: list[str]
    #: (n, 2) height and width of the images in the files.
    sizes: np.ndarray
    #: (n,) how each image is resized: LINEAR, AREA or AS_IT_IS.
    ways: np.ndarray

    @staticmethod
    def of(paths: list[str], sizes: list[tuple[int, int]], ways: list[int]) -> Files:
        """Return the JPEG files among these that can be resized here."""
        kept = [path if way != OTHERWISE and is_jpeg(path) else "" for path, way in zip(paths, ways, strict=True)]
        return Files(kept, np.array(sizes, dtype=np.int64).reshape(-1, 2), np.array(ways, dtype=np.int64))


def is_jpeg(path: str) -> bool:
    return path.lower().endswith(SUFFIXES)


def packed_size(files: Files) -> int:
    """Return bytes that files will take when they are packed, or somewhat more. What is not there takes none."""
    total = 0
    for path, beside in zip(files.paths, (BESIDE + files.sizes.prod(1) * INDEX).astype(np.int64).tolist(), strict=True):
        with contextlib.suppress(OSError):  # the framework says what is wrong when it reads the file
            total += os.stat(path).st_size + beside if path else 0
    return total


def pack_jpeg(file: np.ndarray) -> tuple[np.ndarray, tuple[int, int]] | str:
    """Return a file, packed, and height and width of its image; or why OpenCV has to decode it."""
    storage, images, refusals = ops.jpeg_pack([torch.from_numpy(file)])
    if refusals[0]:
        return refusals[0]
    offset, size, height, width, _ = images[0].tolist()
    return storage[offset : offset + size].numpy(), (height, width)


@dataclass
class Wanted:
    """List images to decode, one a row, in arrays of int64."""

    #: (n,) offsets of the files in the storage.
    places: np.ndarray
    #: (n,) offsets of the images in the output.
    to: np.ndarray
    #: (n, 2) height and width in the file, and in the output.
    sizes: np.ndarray
    kept: np.ndarray
    ways: np.ndarray
    #: (n, 4) x0, y0, x1, y1 of the visible part of each image, in the output's pixels.
    seen: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> Wanted:
        return Wanted(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def decode(self, out: torch.Tensor, storage: torch.Tensor, headers: torch.Tensor) -> None:
        """Decode what is seen; what else is written has no meaning. ``headers`` is the storage, on the CPU."""
        visible = self.seen[:, 2] > self.seen[:, 0]
        as_they_are = self.ways == AS_IT_IS
        _decode(out, storage, headers, self[visible & as_they_are])
        for part in _parts(self[visible & ~as_they_are]):
            ends = one_after_another(part.sizes.prod(1) * CHANNELS)
            pixels = torch.empty(int(ends[-1]), dtype=torch.uint8, device=out.device)
            whole = Wanted(part.places, ends[:-1], part.sizes, part.sizes, part.ways, part._seen_in_files())
            _decode(pixels, storage, headers, whole)
            columns = (np.zeros_like(part.to), ends[:-1], *part.sizes.T, part.to, *part.kept.T, part.ways)
            ops.image_resize_(out, [pixels], _to(out.device, torch.from_numpy(np.stack(columns, 1))))

    def _seen_in_files(self) -> np.ndarray:
        sizes, scale = np.tile(self.sizes[:, ::-1], 2), np.tile(self.sizes[:, ::-1] / self.kept[:, ::-1], 2)
        found = self.seen * scale
        found[:, :2], found[:, 2:] = np.floor(found[:, :2]) - MARGIN, np.ceil(found[:, 2:]) + MARGIN
        return np.clip(found.astype(np.int64), 0, sizes)


def _decode(out: torch.Tensor, storage: torch.Tensor, headers: torch.Tensor, wanted: Wanted) -> None:
    if not len(wanted.to):
        return
    x0, y0, x1, y1 = wanted.seen.T
    pitch = wanted.sizes[:, 1] * CHANNELS
    first = wanted.to + y0 * pitch + x0 * CHANNELS
    asked = np.stack((wanted.places, wanted.places, x0, y0, x1 - x0, y1 - y0, first, pitch), 1)
    plan, sizes = ops.jpeg_plan(headers, torch.from_numpy(asked))
    ops.jpeg_decode_(out, storage, _to(out.device, plan), sizes)


def _parts(wanted: Wanted) -> Iterator[Wanted]:
    """Yield parts whose images have room, or of one image."""
    numbers = np.cumsum(wanted.sizes.prod(1) * CHANNELS) // ROOM
    for number in np.unique(numbers):
        yield wanted[numbers == number]


def _to(device: torch.device, table: torch.Tensor) -> torch.Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def one_after_another(sizes: np.ndarray, end: int = 0) -> np.ndarray:
    """Return where pieces of these sizes begin behind ``end``, at multiples of 16 bytes, and where the last one ends."""
    return -(-end // 16) * 16 + np.concatenate(([0], np.cumsum(-(-sizes // 16) * 16)))
