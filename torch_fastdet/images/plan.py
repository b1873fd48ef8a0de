"""Writes down as tables how a batch is made of images: loader processes send these instead of pixels.

An image of a batch has one layer, or two for mixup. A layer is a canvas with source images placed on it and a map. :func:`pack` makes
the tables of :func:`torch_fastdet.ops.image_augment`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torch_fastdet.images.image_memory import ImageMemory

NO_WARP, AFFINE, PERSPECTIVE = 0, 1, 2
FLIP_LEFT_RIGHT, FLIP_UP_DOWN, KEEP_BGR = 1, 2, 4

#: The value of all channels of a canvas where nothing is placed.
GREY = 114
#: A layer has at most so many placements.
MOST_PLACEMENTS = 16

#: The storages of a packed plan, in order: the shared memory (or the images kept on the GPU), what is sent with the batch, and on a GPU the
#: files decoded for the batch.
SHARED, OWN, FILES = 0, 1, 2


class Indices(list[int]):
    """List the indices of a batch for which a data set makes plans; from a plain list it makes images."""


@dataclass(eq=False)
class Source:
    """Name a whole image by its index where the shared memory has it, else by its pixels."""

    index: int
    height: int
    width: int
    pixels: np.ndarray | None = None


@dataclass
class Layer:
    """Describe ``canvas[y:y+h, x:x+w] = source[src_y:src_y+h, src_x:src_x+w]`` for each of ``placements``, then a map."""

    height: int
    width: int
    #: (source, src_x, src_y, x, y, w, h)
    placements: list[tuple[Source, int, int, int, int, int, int]] = field(default_factory=list)
    warp: int = NO_WARP
    matrix: np.ndarray | None = None
    #: Where the copy-paste mask (height, width) is not zero, the canvas shows its mirror image.
    mask: np.ndarray | None = None


@dataclass
class ImagePlan:
    """Describe one image of a batch, ``height`` by ``width``."""

    height: int
    width: int
    layers: list[Layer]
    blend: float = 1.0
    #: HSV tables (3, 256)
    tables: np.ndarray | None = None
    flags: int = 0

    def is_shared(self) -> bool:
        return all(
            layer.mask is None and all(placement[0].pixels is None for placement in layer.placements)
            for layer in self.layers
        )


def in_pixels(pixels: np.ndarray) -> Source:
    return Source(-1, pixels.shape[0], pixels.shape[1], np.ascontiguousarray(pixels))


def whole(source: Source) -> ImagePlan:
    height, width = source.height, source.width
    return ImagePlan(height, width, [Layer(height, width, [(source, 0, 0, 0, 0, width, height)])])


@dataclass
class Plan:
    """Hold the tables of a batch. All are arrays, so that it crosses a process border in one message."""

    size: tuple[int, int]
    placements: np.ndarray
    layers: np.ndarray
    matrices: np.ndarray
    images: np.ndarray
    blend: np.ndarray
    tables: np.ndarray
    masks: np.ndarray
    #: For each placement the index of its source in the shared memory, or -1 if it is sent with the batch.
    sources: np.ndarray
    #: Pixels that are sent with the batch.
    own: Any
    #: Packed files that are sent with the batch.
    sent: Any
    #: (k, 3) index, bytes and offset in ``sent`` of these files.
    files: np.ndarray

    def tables_with(self, placements: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arguments of ``image_augment`` by name: these placements, and the plan's other tables."""
        rest = {name: getattr(self, name) for name in ("layers", "matrices", "images", "blend", "tables", "masks")}
        return {"placements": placements, **rest}


class Bytes:
    """Lay arrays one after another."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._known: dict[int, int] = {}
        self.size = 0

    def add(self, array: np.ndarray) -> int:
        """Return the array's offset. The same array is kept once."""
        if id(array) not in self._known:
            self._known[id(array)] = self.size
            self._parts.append(array)
            self.size += -(-array.nbytes // 16) * 16  # files begin at such places
        return self._known[id(array)]

    def joined(self, out: np.ndarray | None = None) -> np.ndarray:
        out = np.empty(self.size, dtype=np.uint8) if out is None else out
        for array in self._parts:
            start = self._known[id(array)]
            out[start : start + array.nbytes] = array.reshape(-1)
        return out


def pack(
    images: Sequence[ImagePlan],
    memory: ImageMemory,
    on_cpu: bool = True,
    join: Callable[[Bytes], object] = Bytes.joined,
) -> Plan:
    """Return the tables of a batch. Files that were read for it travel with it; ``on_cpu`` they are decoded here, whole."""
    size = (images[0].height, images[0].width)
    for image in images:
        if (image.height, image.width) != size:
            raise RuntimeError(
                f"images of a batch must have one size, but there are {size[0]}x{size[1]} and "
                f"{image.height}x{image.width} (height x width)"
            )
    own, sent, masks = Bytes(), Bytes(), Bytes()
    placements: list[tuple] = []
    layers: list[tuple] = []
    tables: list[np.ndarray] = []
    matrices, rows, sources, blend = [], [], [], []
    decoded: dict[int, Any] = {}
    for image in images:
        row = [len(layers), -1, image.flags, -1]
        for number, layer in enumerate(image.layers):
            row[number] = len(layers)
            mask = -1 if layer.mask is None else masks.add(layer.mask)
            layers.append((len(placements), len(layer.placements), layer.height, layer.width, layer.warp, mask))
            matrices.append(np.eye(3) if layer.matrix is None else layer.matrix)
            for source, *where in layer.placements:
                pixels, index = source.pixels, source.index
                if on_cpu and pixels is None and memory.is_file(index):
                    if index not in decoded:
                        decoded[index] = memory.get(index)
                    pixels = decoded[index]
                place = (SHARED, memory.offsets[index]) if pixels is None else (OWN, own.add(pixels))
                sources.append(index if pixels is None else -1)
                placements.append((*place, source.height, source.width, *where))
        if image.tables is not None:
            row[3] = len(tables)
            tables.append(image.tables)
        rows.append(row)
        blend.append(image.blend)
    files = [(index, file.nbytes, sent.add(file)) for index, file in ({} if on_cpu else memory.take_sent()).items()]
    return Plan(
        size=size,
        placements=np.array(placements, dtype=np.int64).reshape(-1, 10),
        layers=np.array(layers, dtype=np.int64).reshape(-1, 6),
        matrices=np.array(matrices, dtype=np.float64).reshape(-1, 9),
        images=np.array(rows, dtype=np.int64).reshape(-1, 4),
        blend=np.array(blend, dtype=np.float64),
        tables=np.array(tables, dtype=np.uint8).reshape(-1, 3, 256),
        masks=masks.joined(),
        sources=np.array(sources, dtype=np.int64),
        own=join(own),
        sent=join(sent),
        files=np.array(files, dtype=np.int64).reshape(-1, 3),
    )


# The parts of the source images that a batch shows: of a mosaic 37% of the pixels, on average -------------------------

#: A region needs so many pixels around its corners: the neighbours of bilinear interpolation, and rounding.
SHOWN_MARGIN = 2


def shown_of_canvases(plan: Plan) -> np.ndarray:
    """Return the visible part of each layer's canvas, (layers, 4) x0, y0, x1, y1: all of it behind a paste or an odd map."""
    canvas = np.zeros((len(plan.layers), 4))
    canvas[:, 2:] = plan.layers[:, [3, 2]]
    mapped = np.flatnonzero((plan.layers[:, 4] != NO_WARP) & (plan.layers[:, 5] < 0))
    if not len(mapped):
        return canvas
    height, width = plan.size
    corners = np.array([[0, width, 0, width], [0, 0, height, height], [1, 1, 1, 1]], dtype=np.float64)
    matrices = plan.matrices[mapped].reshape(-1, 3, 3)
    regular = np.abs(np.linalg.det(matrices)) > 1e-12
    points = np.linalg.inv(np.where(regular[:, None, None], matrices, np.eye(3))) @ corners
    regular &= (points[:, 2] > 1e-6).all(1)  # else the horizon of a perspective map is in sight
    points = points[regular, :2] / points[regular, 2:]
    seen = mapped[regular]
    canvas[seen, :2] = np.maximum(canvas[seen, :2], np.floor(points.min(2)) - SHOWN_MARGIN)
    canvas[seen, 2:] = np.minimum(canvas[seen, 2:], np.ceil(points.max(2)) + SHOWN_MARGIN)
    return canvas


def shown(plan: Plan) -> np.ndarray:
    """Return the visible part of each placement's source, in its pixels: (placements, 4) int64 x0, y0, x1, y1; empty where x1 <= x0."""
    counts = plan.layers[:, 1]
    layer = np.repeat(np.arange(len(counts)), counts)
    placement = np.repeat(plan.layers[:, 0] - np.cumsum(counts) + counts, counts) + np.arange(len(layer))
    canvas = shown_of_canvases(plan)[layer]
    src_h, src_w, src_x, src_y, x, y, w, h = plan.placements[placement, 2:].T
    shift = np.stack((src_x - x, src_y - y), 1)
    low = np.maximum(canvas[:, :2], np.stack((x, y), 1)) + shift
    high = np.minimum(canvas[:, 2:], np.stack((x + w, y + h), 1)) + shift
    out = np.zeros((len(plan.placements), 4), dtype=np.int64)
    out[placement, :2] = np.maximum(low, 0)
    out[placement, 2:] = np.minimum(high, np.stack((src_w, src_h), 1))
    return out


def around(rectangles: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """Return the smallest rectangle around those of each group; zeros where all of them are empty."""
    some = (rectangles[:, 2:] > rectangles[:, :2]).all(1)
    low = np.full((groups, 2), np.iinfo(np.int64).max)
    high = np.zeros((groups, 2), dtype=np.int64)
    np.minimum.at(low, group[some], rectangles[some, :2])
    np.maximum.at(high, group[some], rectangles[some, 2:])
    return np.concatenate((np.minimum(low, high), high), 1)


def shown_of(plan: Plan, indices: np.ndarray) -> np.ndarray:
    """Return the part of each of these images, which ascend, that a plan shows, in its pixels: (n, 4) int64."""
    wanted = np.flatnonzero(np.isin(plan.sources, indices))
    return around(shown(plan)[wanted], np.searchsorted(indices, plan.sources[wanted]), len(indices))
