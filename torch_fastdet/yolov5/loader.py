"""YOLOv5's data set and loaders with plans in place of pixels: its random draws, its labels.

Draws come from the same generators in the same order and number as in stock, and boxes go through the same operations in the
same precision, so that labels are stock's bit for bit. What stock has as a function of its own is called.
"""

from __future__ import annotations

import functools
import importlib
import math
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader

from torch_fastdet._say import say
from torch_fastdet.loader.fingerprint import fingerprint
from torch_fastdet.loader.loop import PlanBatches, PlannedLoading
from torch_fastdet.loader.memory import PictureMemory
from torch_fastdet.loader.plan import (
    AFFINE,
    FLIP_LEFT_RIGHT,
    FLIP_UP_DOWN,
    NO_WARP,
    PERSPECTIVE,
    Indices,
    Layer,
    Picture,
    Source,
)
from torch_fastdet.loader.ranks import local_ranks, shared_by_ranks
from torch_fastdet.loader.worker import Collate
from torch_fastdet.memory import UNLIMITED, host_budget

_LEVELS = np.arange(0, 256, dtype=np.float64)


class Planner:
    """Makes the plan of one item of a ``LoadImagesAndLabels``, as its ``__getitem__`` makes pixels."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.memory: PictureMemory = dataset.memory
        self.host, self.augmentations = _modules_of(dataset)
        self.version = dataset.torch_fastdet_version

    def item(self, index: int) -> tuple[Picture, torch.Tensor, str, Any]:
        dataset = self.dataset
        index, hyp = dataset.indices[index], dataset.hyp
        if dataset.mosaic and random.random() < hyp["mosaic"]:
            picture, labels = self._mosaics(index, hyp)
            shapes = None
        else:
            picture, labels, shapes = self._single(index, hyp)
        if len(labels):
            labels[:, 1:5] = self.host.xyxy2xywhn(
                labels[:, 1:5], w=picture.width, h=picture.height, clip=True, eps=1e-3
            )
        if dataset.augment:
            self._colours_and_flips(picture, labels, hyp)
        out = torch.zeros((len(labels), 6))
        if len(labels):
            out[:, 1:] = torch.from_numpy(labels)
        return picture, out, dataset.im_files[index], shapes

    # Layers ----------------------------------------------------------------------------------------------------------

    def _mosaics(self, index: int, hyp: dict[str, Any]) -> tuple[Picture, np.ndarray]:
        layer, labels, size = self._mosaic(index)
        picture = Picture(*size, [layer])
        if random.random() < hyp["mixup"]:
            dataset = self.dataset
            # 7.0 goes past image_weights here.
            second = random.choice(dataset.indices) if self.version.head else random.randint(0, dataset.n - 1)
            layer, more, _ = self._mosaic(second)
            picture.layers.append(layer)
            picture.blend = np.random.beta(32.0, 32.0)
            labels = np.concatenate((labels, more), 0)
        return picture, labels

    def _mosaic(self, index: int) -> tuple[Layer, np.ndarray, tuple[int, int]]:
        dataset, s = self.dataset, self.dataset.img_size
        yc, xc = (int(random.uniform(-edge, 2 * s + edge)) for edge in dataset.mosaic_border)
        indices = [index, *random.choices(dataset.indices, k=3)]
        random.shuffle(indices)
        layer = Layer(2 * s, 2 * s)
        all_labels, scales = [], []
        all_segments: list[np.ndarray] = []
        for corner, index in enumerate(indices):
            source, _ = self._source(index)
            h, w = source.height, source.width
            # Pictures touch the centre with one corner, and are cut off at the canvas' edges.
            left, top = corner in (0, 2), corner in (0, 1)
            x1, x2 = (max(xc - w, 0), xc) if left else (xc, min(xc + w, 2 * s))
            y1, y2 = (max(yc - h, 0), yc) if top else (yc, min(yc + h, 2 * s))
            src_x, src_y = (w - (x2 - x1) if left else 0), (h - (y2 - y1) if top else 0)
            layer.placements.append((source, src_x, src_y, x1, y1, x2 - x1, y2 - y1))
            labels, segments = dataset.labels[index], dataset.segments[index]
            all_labels.append(labels)
            scales += [(w, h, x1 - src_x, y1 - src_y)] * len(labels)
            if segments:
                moved = (self.host.xyn2xy(x, w, h, x1 - src_x, y1 - src_y) for x in segments)
                all_segments.extend(moved if labels.size else segments.copy())
        labels = np.concatenate(all_labels, 0)
        _to_corners(labels, np.array(scales, dtype=labels.dtype).reshape(-1, 4))
        for x in (labels[:, 1:], *all_segments):
            np.clip(x, 0, 2 * s, out=x)
        labels, segments = self._copy_paste(layer, labels, all_segments, dataset.hyp["copy_paste"])
        labels, size = self._perspective(layer, labels, segments, dataset.hyp, dataset.mosaic_border)
        return layer, labels, size

    def _single(self, index: int, hyp: dict[str, Any]) -> tuple[Picture, np.ndarray, Any]:
        dataset = self.dataset
        source, (h0, w0) = self._source(index)
        h, w = source.height, source.width
        size = dataset.batch_shapes[dataset.batch[index]] if dataset.rect else dataset.img_size
        layer, ratio, pad = self._letterbox(source, size)
        shapes = (h0, w0), ((h / h0, w / w0), pad)
        labels = dataset.labels[index].copy()
        if labels.size:
            labels[:, 1:] = self.host.xywhn2xyxy(labels[:, 1:], ratio * w, ratio * h, padw=pad[0], padh=pad[1])
        out = layer.height, layer.width
        if dataset.augment:
            labels, out = self._perspective(layer, labels, (), hyp, (0, 0))
        return Picture(*out, [layer]), labels, shapes

    def _letterbox(self, source: Source, size: Any) -> tuple[Layer, Any, tuple[Any, Any]]:
        """A picture in the middle of a canvas: the layer, the factor of its size, and what is free on each side."""
        target_h, target_w = (size, size) if isinstance(size, int) else size
        ratio = min(target_h / source.height, target_w / source.width)
        if not self.dataset.augment:
            ratio = min(ratio, 1.0)
        w, h = round(source.width * ratio), round(source.height * ratio)
        free_w, free_h = (target_w - w) / 2, (target_h - h) / 2
        if (w, h) != (source.width, source.height):
            pixels = self.dataset.load_image(source.index)[0]
            source = Source(source.index, h, w, cv2.resize(pixels, (w, h), interpolation=cv2.INTER_LINEAR))
        top, bottom = round(free_h - 0.1), round(free_h + 0.1)
        left, right = round(free_w - 0.1), round(free_w + 0.1)
        layer = Layer(top + h + bottom, left + w + right, [(source, 0, 0, left, top, w, h)], NO_WARP)
        return layer, ratio, (free_w, free_h)

    def _source(self, index: int) -> tuple[Source, tuple[int, int]]:
        """A picture as stock's ``load_image`` returns it: where it is, and its original size."""
        memory = self.memory
        if not self.dataset.remembers(index):
            pixels, original, (height, width) = self.dataset.load_image(index)
            if not self.dataset.remembers(index):
                return Source(int(index), height, width, np.ascontiguousarray(pixels)), original
        return Source(int(index), *memory.shape(index)), memory.original(index)

    # Augmentations ---------------------------------------------------------------------------------------------------

    def _copy_paste(
        self, layer: Layer, labels: np.ndarray, segments: list[np.ndarray], p: float
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Mirror images of some objects are pasted where they hide less than 30% of every other one."""
        n = len(segments)
        if not (p and n):
            return labels, segments
        mask = np.zeros((layer.height, layer.width), np.uint8)
        for chosen in random.sample(range(n), k=round(p * n)):
            label, segment = labels[chosen], segments[chosen]
            box = layer.width - label[3], label[2], layer.width - label[1], label[4]
            hidden = self.augmentations.bbox_ioa(np.array(box)[None] if self.version.head else box, labels[:, 1:5])
            if (hidden < 0.30).all():
                labels = np.concatenate((labels, [[label[0], *box]]), 0)
                segments.append(np.concatenate((layer.width - segment[:, 0:1], segment[:, 1:2]), 1))
                cv2.drawContours(mask, [segments[chosen].astype(np.int32)], -1, (1,), cv2.FILLED)
        if mask.any():
            layer.mask = cv2.flip(mask, 1)
        return labels, segments

    def _perspective(
        self,
        layer: Layer,
        labels: np.ndarray,
        segments: Any,
        hyp: dict[str, Any],
        border: Any,
    ) -> tuple[np.ndarray, tuple[int, int]]:
        """Draw the map of a layer and move its labels. Returns them, and the size of what is seen through the map."""
        height, width = layer.height + border[0] * 2, layer.width + border[1] * 2
        perspective = hyp["perspective"]
        matrix, scale = _draw_matrix(layer, hyp, height, width)
        if border[0] != 0 or border[1] != 0 or (matrix != np.eye(3)).any():
            layer.warp, layer.matrix = (PERSPECTIVE if perspective else AFFINE), matrix
        n = len(labels)
        if not n:
            return labels, (height, width)
        use_segments = any(x.any() for x in segments) and len(segments) == n
        if use_segments:
            new = self._boxes_of_segments(segments, matrix, perspective, height, width)
        else:
            new = _move_boxes(labels, matrix, perspective, height, width)
        kept = self.augmentations.box_candidates(
            box1=labels[:, 1:5].T * scale, box2=new.T, area_thr=0.01 if use_segments else 0.10
        )
        labels = labels[kept]
        labels[:, 1:5] = new[kept]
        return labels, (height, width)

    def _boxes_of_segments(
        self, segments: list[np.ndarray], matrix: np.ndarray, perspective: float, height: int, width: int
    ) -> np.ndarray:
        new = np.zeros((len(segments), 4))
        for row, segment in enumerate(self.augmentations.resample_segments(segments)):
            points = np.ones((len(segment), 3))
            points[:, :2] = segment
            points = points @ matrix.T
            points = points[:, :2] / points[:, 2:3] if perspective else points[:, :2]
            new[row] = self.augmentations.segment2box(points, width, height)
        return new

    @staticmethod
    def _colours_and_flips(picture: Picture, labels: np.ndarray, hyp: dict[str, Any]) -> None:
        gains = hyp["hsv_h"], hyp["hsv_s"], hyp["hsv_v"]
        if any(gains):
            hue, saturation, value = np.random.uniform(-1, 1, 3) * gains + 1
            tables = np.empty((3, 256), dtype=np.uint8)
            tables[0] = (_LEVELS * hue) % 180
            tables[1] = np.clip(_LEVELS * saturation, 0, 255)
            tables[2] = np.clip(_LEVELS * value, 0, 255)
            picture.tables = tables
        for chance, flag, column in ((hyp["flipud"], FLIP_UP_DOWN, 2), (hyp["fliplr"], FLIP_LEFT_RIGHT, 1)):
            if random.random() < chance:
                picture.flags |= flag
                if len(labels):
                    labels[:, column] = 1 - labels[:, column]


def _to_corners(labels: np.ndarray, scales: np.ndarray) -> None:
    """Normalised x, y, w, h become corners in pixels, in place: stock's ``xywhn2xyxy`` for several pictures at once.

    ``scales`` has a row (width, height, left, top) for each label.
    """
    centres, halves = labels[:, 1:3], labels[:, 3:5] / 2
    low = scales[:, :2] * (centres - halves) + scales[:, 2:]
    high = scales[:, :2] * (centres + halves) + scales[:, 2:]
    labels[:, 1:3], labels[:, 3:5] = low, high


def _draw_matrix(layer: Layer, hyp: dict[str, Any], height: int, width: int) -> tuple[np.ndarray, float]:
    """A random map of the canvas to ``height`` x ``width``, and how much it enlarges."""
    centre, perspective, rotation, shear, translation = (np.eye(3) for _ in range(5))
    centre[0, 2], centre[1, 2] = -layer.width / 2, -layer.height / 2
    perspective[2, 0] = random.uniform(-hyp["perspective"], hyp["perspective"])
    perspective[2, 1] = random.uniform(-hyp["perspective"], hyp["perspective"])
    angle = random.uniform(-hyp["degrees"], hyp["degrees"])
    scale = random.uniform(1 - hyp["scale"], 1 + hyp["scale"])
    rotation[:2] = cv2.getRotationMatrix2D(angle=angle, center=(0, 0), scale=scale)
    shear[0, 1] = math.tan(random.uniform(-hyp["shear"], hyp["shear"]) * math.pi / 180)
    shear[1, 0] = math.tan(random.uniform(-hyp["shear"], hyp["shear"]) * math.pi / 180)
    translation[0, 2] = random.uniform(0.5 - hyp["translate"], 0.5 + hyp["translate"]) * width
    translation[1, 2] = random.uniform(0.5 - hyp["translate"], 0.5 + hyp["translate"]) * height
    return translation @ shear @ rotation @ perspective @ centre, scale


def _move_boxes(labels: np.ndarray, matrix: np.ndarray, perspective: float, height: int, width: int) -> np.ndarray:
    """Boxes around the mapped corners of boxes, cut off at the picture's edges."""
    n = len(labels)
    points = np.ones((n * 4, 3))
    points[:, :2] = labels[:, [1, 2, 3, 4, 1, 4, 3, 2]].reshape(n * 4, 2)
    points = points @ matrix.T
    corners = (points[:, :2] / points[:, 2:3] if perspective else points[:, :2]).reshape(n, 4, 2)
    low, high = corners.min(1), corners.max(1)
    new = np.concatenate((low, high), 1)
    new[:, [0, 2]] = new[:, [0, 2]].clip(0, width)
    new[:, [1, 3]] = new[:, [1, 3]].clip(0, height)
    return new


# What stands in for stock's names ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """What differs between the YOLOv5 versions that are known here."""

    head: bool  # GitHub's head of 2026, not 7.0


# Fingerprints of what stands in this file in other words: 7.0 (and PyPI's 7.0.14), then GitHub's head.
KNOWN = {
    "LoadImagesAndLabels.__getitem__": ("9393ca1d", "8e453675"),
    "LoadImagesAndLabels.load_mosaic": ("6cbcbcaa", "4db0009e"),
    "InfiniteDataLoader": ("1fe0ada3",),
    "random_perspective": ("c2deef3a", "b3682339", "9ed20506"),
    "augment_hsv": ("188b2f39",),
    "mixup": ("3edefad9",),
    "letterbox": ("c04b349e", "f051914d"),
    "copy_paste": ("46addf7a", "96694ddd"),
}


def known_version(host: Any) -> tuple[Version | None, str]:
    """Which YOLOv5 the module ``utils.dataloaders`` is of, or what in it is not known here."""
    found = {}
    for name, known in KNOWN.items():
        value = functools.reduce(lambda owner, part: vars(owner)[part], name.split("."), host)
        found[name] = fingerprint(value)
        if found[name] not in known:
            return None, f"{host.__name__}.{name} is not the one of YOLOv5 7.0 or of GitHub's head."
    heads = {name: found[name] == KNOWN[name][1] for name in ("LoadImagesAndLabels.__getitem__", "copy_paste")}
    if len(set(heads.values())) > 1:
        return None, f"{host.__name__} is half of YOLOv5 7.0 and half of GitHub's head."
    labels = np.random.default_rng(0).random((50, 5), dtype=np.float32)
    moved = labels.copy()
    _to_corners(moved, np.array([(641, 480, 77, -31)] * 50, dtype=np.float32))
    if not np.array_equal(moved[:, 1:], host.xywhn2xyxy(labels[:, 1:], 641, 480, 77, -31)):
        return None, f"{host.__name__}.xywhn2xyxy rounds in another way than YOLOv5 7.0's."
    return Version(head=heads["copy_paste"]), ""


def _modules_of(dataset: Any) -> tuple[Any, Any]:
    host = sys.modules[dataset.torch_fastdet_stock.__module__]
    return host, sys.modules[host.random_perspective.__module__]


@functools.cache
def dataset_class(stock: type, version: Version) -> type:
    """``LoadImagesAndLabels`` with a memory that all processes share, and with plans for those who ask for them."""

    class LoadImagesAndLabels(stock):
        torch_fastdet_stock = stock
        torch_fastdet_version = version

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._memory: PictureMemory | None = None
            self._memory_lock: Any = threading.Lock()
            self._memory_is_of: tuple[int, bool] | None = None
            self._all_in_memory = False
            super().__init__(*args, **kwargs)
            _ = self.memory  # while other ranks wait for the first one

        @property
        def memory(self) -> PictureMemory:
            with self._memory_lock:
                if self._memory is None:
                    self._memory = _memory_for(self, everything=self._all_in_memory)
                    self._memory_is_of = self.img_size, self.augment
                return self._memory

        def remembers(self, i: int) -> bool:
            """Whether the memory has the picture as ``load_image`` gives it now."""
            # Stock's own cache of pictures (--cache ram) keeps them in the size that they had.
            return self.memory.has(i) and (self.ims[i] is not None or self._memory_is_current())

        def _memory_is_current(self) -> bool:
            return self._memory_is_of == (self.img_size, self.augment)

        def check_cache_ram(self, *args: Any, **kwargs: Any) -> bool:
            self._all_in_memory = super().check_cache_ram(*args, **kwargs)
            # What the first rank has decoded takes no more memory here.
            return self._all_in_memory or (local_ranks()[0] > 0 and self.memory.has_all())

        def cache_images_to_disk(self, i: int) -> None:
            there = self.npy_files[i].exists()
            try:
                super().cache_images_to_disk(i)
            except BaseException:
                if not there:  # a full disk: half a file would be read as a picture ever after
                    self.npy_files[i].unlink(missing_ok=True)
                raise

        def load_image(self, i: int) -> tuple[np.ndarray, tuple[int, int], tuple[int, int]]:
            if self.ims[i] is not None:
                return super().load_image(i)
            memory = self.memory
            if not self._memory_is_current():
                return super().load_image(i)  # somebody has set another size since
            picture = memory.get(i)
            if picture is None:
                picture, original, size = super().load_image(i)
                if not memory.put(i, picture, original):
                    return picture, original, size
                picture = memory.get(i)
                assert picture is not None
            return picture, memory.original(i), picture.shape[:2]

        def __getitems__(self, indices: list[int]) -> list:
            if isinstance(indices, Indices):
                planner = Planner(self)
                return [planner.item(index) for index in indices]
            return [self[index] for index in indices]

        def __getstate__(self) -> dict[str, Any]:
            return {**self.__dict__, "_memory_lock": None}

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            self._memory_lock = threading.Lock()

        def __reduce_ex__(self, protocol: Any) -> Any:
            if type(self) is not LoadImagesAndLabels:
                return super().__reduce_ex__(protocol)
            return _new_dataset, (stock.__module__, version), self.__getstate__()

    LoadImagesAndLabels.__module__, LoadImagesAndLabels.__qualname__ = __name__, stock.__name__
    return LoadImagesAndLabels


def _new_dataset(module: str, version: Version) -> Any:
    """An empty data set, in a process that may have no patch()."""
    stock: Any = importlib.import_module(module).LoadImagesAndLabels
    cls = dataset_class(vars(stock).get("torch_fastdet_stock", stock), version)
    return object.__new__(cls)


def _memory_for(dataset: Any, everything: bool) -> PictureMemory:
    """A memory with places for a data set's pictures, in the sizes that ``load_image`` will give them."""
    shapes = []
    for w0, h0 in dataset.shapes.tolist():
        ratio = dataset.img_size / max(h0, w0)
        shapes.append((math.ceil(h0 * ratio), math.ceil(w0 * ratio)) if ratio != 1 else (h0, w0))
    budget = UNLIMITED if everything else host_budget()
    what = (str(dataset.img_size), str(dataset.augment), *dataset.im_files)
    return shared_by_ranks(what, shapes, budget)


def cannot_plan(dataset: Any) -> str | None:
    """Why a data set's pictures are stock's to make; None where they are not."""
    if "torch_fastdet_stock" not in vars(type(dataset)):
        return f"{type(dataset).__name__} makes more than boxes."
    if getattr(dataset.albumentations, "transform", None) is not None:
        return "Albumentations, which is installed, changes pictures."
    return None


def loader_classes(stock: type) -> tuple[type, type]:
    """Stand-ins for ``InfiniteDataLoader`` and for the ``DataLoader`` that ``create_dataloader`` takes."""

    class InfiniteDataLoader(stock):
        def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
            self._plans = _planned(dataset, kwargs)
            if self._plans is None:
                super().__init__(dataset, *args, **kwargs)
                return
            DataLoader.__init__(self, dataset, *args, **kwargs)
            object.__setattr__(self, "batch_sampler", PlanBatches(self.batch_sampler, repeat=True))
            self.iterator = DataLoader.__iter__(self)
            self._batches: Any = None

        def __iter__(self) -> Iterator[tuple]:
            if self._plans is None:
                yield from super().__iter__()
                return
            if self._batches is None:
                self._batches = self._plans.batches(self.iterator)
            for _ in range(len(self)):
                yield next(self._batches)

    class PlanDataLoader(DataLoader):
        def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
            self._plans = _planned(dataset, kwargs)
            super().__init__(dataset, *args, **kwargs)
            if self._plans is not None:
                object.__setattr__(self, "batch_sampler", PlanBatches(self.batch_sampler))

        def __iter__(self) -> Any:
            batches = super().__iter__()
            return batches if self._plans is None else self._plans.batches(batches)

    PlanDataLoader.__name__ = PlanDataLoader.__qualname__ = "DataLoader"
    InfiniteDataLoader.__qualname__ = "InfiniteDataLoader"
    return InfiniteDataLoader, PlanDataLoader


def _planned(dataset: Any, options: dict[str, Any]) -> PlannedLoading | None:
    """Set up plans for a loader and change its options accordingly; None where stock makes the pictures."""
    reason = cannot_plan(dataset)
    if reason is not None:
        if hasattr(type(dataset), "torch_fastdet_stock"):
            say(f"loader_optim: decodes each picture once, and leaves the rest to YOLOv5: {reason}")
        return None
    collate = options.get("collate_fn")
    if collate not in (type(dataset).collate_fn, type(dataset).collate_fn4) or options.get("batch_size", 1) is None:
        return None  # a loader of somebody's own
    on_gpu = torch.cuda.is_available()
    options["collate_fn"] = Collate(collate, dataset.memory, on_gpu)
    options["pin_memory"] = False
    return PlannedLoading(dataset.memory, options.get("num_workers", 0), on_gpu)
