"""Reads what Ultralytics' predictor predicts on, as batches: threads read files ahead, and images are on the device already.

Which files there are, how a file that is not a JPEG file is read and what is said of one that cannot be read is left to Ultralytics'
loaders.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import struct
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor

from torch_fastdet import ops
from torch_fastdet.images.ahead import in_order
from torch_fastdet.images.jpeg_files import is_jpeg
from torch_fastdet.memory import is_out_of_memory
from torch_fastdet.ops.jpeg import decode_packed
from torch_fastdet.patching.protocols import Loader
from torch_fastdet.patching.replace import is_code_of
from torch_fastdet.switches.predict.common import UPLOAD, fits, one_after_another
from torch_fastdet.switches.predict.results import Images, Pixels

READERS = 4  # threads
#: So many images of a list, or ``batch`` if that is more, go through the network at once. Ultralytics takes the whole list as one batch.
LIST_BATCH = 16
one_opens = threading.Lock()  # Pillow registers formats when it opens a first file of them


@dataclass
class Batch:
    """Hold one batch: what Ultralytics' loaders give, and where its images are on the device."""

    paths: list[str]
    images: Images
    #: The beginning of a line to print for each image.
    info: list[str]
    #: The loader in its state when it returned the batch.
    dataset: Loader
    #: Device memory that holds the images; empty if they are not on the device.
    storages: list[Tensor]
    #: The index of each image's storage, and its offset there.
    where: list[tuple[int, int]]
    #: Recorded when the images are on the device.
    ready: torch.cuda.Event | None = None
    #: True for a part of a list whose images have several shapes.
    mixed: bool = False


class Stager:
    """Decode JPEG files and upload arrays to ``device``, on ``stream``; that is None on a CPU."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.device, self.cuda, self._stream = device, device.type == "cuda", stream

    def _on_stream(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _event(self) -> torch.cuda.Event | None:
        """Return an event behind all that is decoded and uploaded; None on a CPU."""
        stream = torch.cuda.current_stream(self.device) if self.cuda and self._stream is None else self._stream
        return None if stream is None else stream.record_event()

    def decoded(self, files: list[Any], otherwise: Callable[[int], Any]) -> list[Any]:
        """Return ``files`` with :class:`Pixels` in the places of tensors; ``otherwise(i)`` where the decoder refuses the i-th file."""
        places = [i for i, file in enumerate(files) if isinstance(file, Tensor)]
        made = list(files)
        if not places:
            return made
        try:
            with self._on_stream():
                storage, found, refusals = ops.jpeg_pack(
                    [files[i] for i in places], pin_memory=self.cuda, segment=1 if self.cuda else 4
                )
                taken = [i for i, reason in zip(places, refusals) if not reason]
                rows = [row for row, reason in zip(found.tolist(), refusals) if not reason]
                images, ready = decode_packed(storage, rows, self.device), self._event()
                for i, pixels in zip(taken, images):
                    made[i] = Pixels(pixels, files[i], ready)
        except RuntimeError as error:
            if not is_out_of_memory(error):  # of pinned memory, too
                raise
        return [otherwise(i) if isinstance(each, Tensor) else each for i, each in enumerate(made)]

    def batch(
        self, paths: list[str], images: list[Any], info: list[str], dataset: Loader, mixed: bool = False
    ) -> Batch:
        """Return a batch; its arrays are uploaded in one copy."""
        made = Batch(paths, Images(images), info, dataset, [], [], mixed=mixed)
        arrays = [image for image in images if not isinstance(image, Pixels)]
        decoded = {
            i: each.pixels for i, each in enumerate(images) if isinstance(each, Pixels) and each.pixels is not None
        }
        known = len(arrays) + len(decoded) == len(images) and (fits(arrays) or not arrays)
        alike = not (arrays and decoded) or arrays[0].shape[2] == 3  # in channels
        if known and alike and sum(a.size for a in arrays) <= UPLOAD:
            with self._on_stream():
                buffer, ends = one_after_another(arrays, self.cuda and bool(arrays))
                made.storages = [buffer.to(self.device, non_blocking=True)] if arrays else []
            if decoded:  # views of one allocation
                first = next(iter(decoded.values()))
                made.storages.append(first.as_strided((first.untyped_storage().nbytes(),), (1,), 0))
            last, offsets = len(made.storages) - 1, iter(ends)
            made.where = [
                (last, int(decoded[i].storage_offset())) if i in decoded else (0, next(offsets))
                for i in range(len(images))
            ]
        made.ready = self._event()
        return made


def sequential_jpeg(path: str) -> tuple[Tensor, Header] | None:
    """Return the bytes and the header of a sequential JPEG file; None for another file, and for one that cannot be read."""
    if not is_jpeg(path):
        return None
    try:
        data = beginning_of(path)
    except OSError:
        return None  # Ultralytics says what is wrong
    header = header_of(data.data)
    return (torch.from_numpy(data), header) if header is not None and header.frame <= 0xC1 else None


def beginning_of(path: str | os.PathLike, most: int | None = None) -> np.ndarray:
    """Return a file's bytes, or its first ``most``, by few calls that other threads have to wait for."""
    file = os.open(path, os.O_RDONLY)
    try:
        room = np.empty(os.fstat(file).st_size if most is None else most, dtype=np.uint8)
        return room[: os.readv(file, [room.data])]
    finally:
        os.close(file)


def _read_ahead(read: Callable[[Any], Any], what: list[Any], batch: int) -> Generator[Any]:
    """Yield ``read(each)`` of ``what`` in order. Threads read two batches ahead. An exception is raised when its turn comes.

    A batch is two groups: JPEG files take two threads half a millisecond, and more of them hinder the thread that predicts.
    """
    group = max(batch // 2, 2)

    def read_group(begin: int) -> list[Any]:
        found: list[Any] = []
        for each in what[begin : begin + group]:
            try:
                found.append(read(each))
            except Exception as error:
                return [*found, error]
        return found

    with contextlib.closing(in_order(read_group, range(0, len(what), group), READERS, READERS)) as groups:
        for each in itertools.chain.from_iterable(groups):
            if isinstance(each, Exception):
                raise each
            yield each


def of_files(dataset: Loader, stager: Stager) -> Generator[Batch]:
    """Yield the batches of a ``LoadImagesAndVideos``: images as it reads them, then the frames of its videos."""
    stock = type(dataset).__next__
    imread, own = stock.__globals__["imread"], is_code_of(stock.__globals__["imread"], "ultralytics")
    in_turn = stock.__globals__.get("PIL_FALLBACK_SUFFIXES", ())

    def by_opencv(path: str) -> np.ndarray | None:
        with one_opens if path.lower().endswith(tuple(in_turn)) else contextlib.nullcontext():
            return imread(path, flags=dataset.cv2_flag)

    def read(path: str) -> object:
        decodes = own and dataset.cv2_flag == cv2.IMREAD_COLOR
        found = sequential_jpeg(path) if decodes else None
        return by_opencv(path) if found is None else found[0]

    files, batch = dataset.files[: dataset.ni], math.ceil(dataset.bs)  # Ultralytics takes 2.5, too
    read_ahead = _read_ahead(read, files[dataset.count :], batch)
    with contextlib.closing(read_ahead):
        while dataset.count < dataset.ni:
            paths: list[str] = []
            images: list[Any] = []
            info: list[str] = []
            while len(images) < batch and dataset.count < dataset.ni:
                group = list(itertools.islice(read_ahead, batch - len(images)))
                if images:  # in the places of files that cannot be read
                    decoded = [by_opencv(files[dataset.count + i]) for i in range(len(group))]
                else:
                    decoded = stager.decoded(group, lambda i: by_opencv(files[dataset.count + i]))
                for image in decoded:
                    dataset.count += 1
                    dataset._append_image(paths, images, info, files[dataset.count - 1], image, dataset.count)
            dataset.mode = "image"
            if images:
                yield stager.batch(paths, images, info, copy.copy(dataset))
    while dataset.count < dataset.nf and (found := next(dataset, None)) is not None:
        paths, images, info = found
        yield stager.batch(paths, images, info, copy.copy(dataset))


def of_streams(dataset: Loader, stager: Stager) -> Generator[Batch]:
    """Yield the batches of a ``LoadStreams``, none before its turn: a camera's next frame would wait for another one."""
    while (found := next(dataset, None)) is not None:
        paths, images, info = found
        yield stager.batch(paths, images, info, dataset)


def of_list(dataset: Loader, batch: int, stager: Stager, mixed: bool) -> Generator[Batch]:
    count, elements = len(dataset), dataset.im0
    ahead = hasattr(dataset, "read")
    read_ahead = _read_ahead(dataset.read, elements, batch) if ahead else (element for element in elements)
    dataset.count = 1
    with contextlib.closing(read_ahead):
        for begin in range(0, count, batch):
            group = list(itertools.islice(read_ahead, batch))
            paths, names = dataset.paths[begin : begin + batch], elements[begin : begin + batch]

            def by_pillow(i: int, names: list[Any] = names) -> object:
                return dataset.by_pillow(names[i])

            yield stager.batch(paths, stager.decoded(group, by_pillow), [""] * len(group), dataset, mixed)


def is_mixed(dataset: Loader) -> bool:
    """Return whether the images of a list have several shapes. Run in the caller's thread, where Ctrl-C ends it."""
    shape_of = getattr(dataset, "shape_of", lambda image: image.shape)
    shapes = filter(None, map(shape_of, dataset.im0))
    first = next(shapes, None)
    return any(shape != first for shape in shapes)


class Header(NamedTuple):
    """Read what comes before the image in a JPEG file."""

    frame: int  # its marker: 0xC0 and 0xC1 are sequential
    shape: tuple[int, int, int]
    exif: bool
    pillow_turns: bool  # Pillow may find another orientation than OpenCV


def header_of(data: memoryview) -> Header | None:
    """Return the header of a JPEG file that is ``data``, or begins with it; None if it is damaged or longer."""
    if bytes(data[:2]) != b"\xff\xd8":
        return None
    at, exif, pillow_turns = 2, False, False
    while at + 9 < len(data) and data[at] == 0xFF:
        marker, size = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
            return Header(marker, (height, width, 3), exif, pillow_turns)
        if marker == 0xE1:
            segment = bytes(data[at + 4 : at + 2 + size])
            of_exif = segment.startswith(b"Exif")
            exif, in_xmp = exif or of_exif, b"Orientation" in segment  # OpenCV does not look there
            pillow_turns = pillow_turns or in_xmp or (of_exif and not _turns_plainly(segment))
        at += 2 + size
    return None


def _turns_plainly(exif: bytes) -> bool:
    """Return whether each orientation is one number of 16 bits. OpenCV reads such a number, whatever the type; Pillow follows the type."""
    order = "<" if exif[6:8] == b"II" else ">"
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 10)
        (entries,) = struct.unpack_from(f"{order}H", exif, 6 + at)
        kinds = [struct.unpack_from(f"{order}HHI", exif, 8 + at + 12 * i) for i in range(entries)]
    except struct.error:
        return False
    return all(kind == (0x0112, 3, 1) for kind in kinds if kind[0] == 0x0112)
