"""Runs Ultralytics' data sets and transforms with plans instead of pixels.

While a batch is planned, they are seen through objects of derived classes, which share their attributes and run copies of their own
methods (:mod:`torch_fastdet.images.recorder`).
"""

from __future__ import annotations

import operator
import os
import sys
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from torch_fastdet._say import warn
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet.images.image_memory import CHANNELS, ImageMemory
from torch_fastdet.images.recorder import Recorder
from torch_fastdet.images.unread import Unread, reader, sharing
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.protocols import Names, UltralyticsDataset

AS_STOCK = "loader_optim: the original loader makes the batches: {}"
AUGMENT, DATASET = "ultralytics.data.augment", "ultralytics.data.dataset"


class Planner:
    """Plan the items of a ``YOLODataset``, whose decoded ``files`` of this ``imgsz`` ``memory`` keeps."""

    def __init__(self, dataset: UltralyticsDataset, memory: ImageMemory, files: list[str], size: object) -> None:
        self._made_of = dataset, memory, files, size
        self.recorder = Recorder(memory, "Ultralytics")
        self.files = files
        self.size = size
        self._classes: dict[type, type | None] = {}
        self.stock = dataset
        #: The data set's values for the images that this batch has loaded.
        self.changed: dict[int, tuple] = {}
        #: The data set that loader processes get: with the same attributes, but its batches are planned.
        self.dataset = self.view(dataset)
        #: The data set whose ``load_image`` records what is loaded, as mosaics choose among the images that were loaded last.
        self.reader = reader(type(dataset), dataset.__dict__, memory.original)

    def items(self, indices: list[int]) -> list[Names]:
        """Return what the original data set returns for a batch, with a :class:`ImagePlan` under ``img``."""
        if (obstacle := obstacle_in_dataset(self.stock)) is not None:  # somebody has changed its transforms since
            if get_worker_info() is None:  # the loader has said it before it started a process
                warn(AS_STOCK.format(obstacle))
            decode_kept(self.stock, self.recorder.memory)
            return [self.stock[index] for index in indices]
        loaded = list(self.stock.buffer)
        self.changed.clear()
        return self.recorder.items(lambda: self._planned(indices), lambda: self._stocks(indices, loaded))

    def __reduce__(self) -> tuple[object, ...]:
        return Planner, self._made_of

    def _planned(self, indices: list[int]) -> list[Names]:
        kept = self.stock.ims
        with own_attributes([] if isinstance(kept, list) else [(kept, "is_planned", True)]):
            return [self._item(i) for i in indices]

    def _item(self, index: int) -> dict[str, object]:
        item = self.dataset[index]
        item["img"] = self.recorder.plan_of(item["img"])
        return item

    def _stocks(self, indices: list[int], loaded: list[int]) -> list[dict[str, object]]:
        """Return the same items by the original transforms, as if none had been asked for before."""
        dataset = self.stock
        dataset.buffer[:] = loaded
        if isinstance(dataset.ims, list):  # a cache of all images does not change
            for i, was in self.changed.items():
                dataset.ims[i], dataset.im_hw0[i], dataset.im_hw[i] = was
        decode_kept(dataset, self.recorder.memory)
        return [dataset[index] for index in indices]

    def view(self, thing: object) -> Any:
        """Return ``thing``, with the same attributes, but with pixels put off; what touches none is returned as it is."""
        stock = type(thing)
        if stock not in self._classes:
            self._classes[stock] = self._class_of(stock)
        made = self._classes[stock]
        if made is None:
            return thing
        return sharing(made, thing.__dict__, planner=self)

    def _class_of(self, stock: type) -> type | None:
        mixin = view_class(stock)
        if mixin is None:
            return None
        methods = self.recorder.copies.methods(stock)
        kept = {name: method for name, method in methods.items() if name not in vars(mixin)}
        return type(stock.__qualname__, (mixin, stock), {**kept, "__slots__": ("planner",)})


def view_class(stock: type) -> type | None:
    """Return what goes in front of a class to put pixels off; None for all but the known classes of Ultralytics."""
    mixin = MIXINS.get((stock.__module__, stock.__qualname__))
    defined = mixin is not None and getattr(sys.modules[stock.__module__], stock.__qualname__) is stock
    return mixin if defined else None


def decode_kept(dataset: UltralyticsDataset, memory: ImageMemory) -> None:
    """Give a data set pixels for what it has loaded: the original code is about to read them."""
    for i in dataset.buffer:
        loaded = dataset.ims[i]
        if isinstance(loaded, Unread):
            memory.read(i)
            loaded = memory.get(i)
            memory.take_sent()
        if isinstance(loaded, np.ndarray) and not loaded.flags.writeable:
            loaded = loaded.copy()  # the original code may draw on it
        dataset.ims[i] = loaded


class View:
    """Wrap a transform whose own code runs."""

    __slots__ = ()


class DatasetView(View):
    __slots__ = ()

    def __getitems__(self: UltralyticsDataset, indices: list[int]) -> list[Names]:
        return self.planner.items(indices)

    def __reduce_ex__(self: UltralyticsDataset, protocol: object) -> tuple[object, ...]:
        return operator.attrgetter("dataset"), (self.planner,)

    def load_image(self: UltralyticsDataset, i: int, rect_mode: bool = True, resize_short: bool = False) -> tuple:
        return self._load(i, rect_mode and not resize_short, rect_mode, resize_short)

    def _load(self: UltralyticsDataset, i: int, as_kept: bool, *arguments: bool) -> tuple:
        planner = self.planner
        recorder, memory = planner.recorder, planner.recorder.memory
        usual = as_kept and self.imgsz == planner.size and self.im_files[i] == planner.files[i]
        for number in (i, *self.buffer[:1]):
            planner.changed.setdefault(number, (self.ims[number], self.im_hw0[number], self.im_hw[number]))
        if usual and (memory.has(i) or (not os.path.exists(self.npy_files[i]) and memory.read(i))):
            _, original, size = planner.reader.load_image(i)
            if isinstance(self.ims[i], Unread) and not (memory.is_file(i) and get_worker_info()):
                self.ims[i] = memory.get(i)
            return recorder.of_memory(i), original, size
        if isinstance(self.ims[i], Unread):
            self.ims[i] = memory.get(i)
        pixels, original, size = super().load_image(i, *arguments)  # type: ignore[misc]
        if not usual or not memory.put(i, pixels, original):
            return recorder.of_pixels(pixels), original, size
        if self.ims[i] is pixels:
            self.ims[i] = memory.get(i)  # this process needs none of its own
        return recorder.of_memory(i), original, size

    @property
    def transforms(self: UltralyticsDataset) -> object:
        return self.planner.view(vars(self)["transforms"])


class StretchedView(DatasetView):
    """Wrap RT-DETR's data set, whose images are stretched to the size of the training."""

    __slots__ = ()

    def load_image(self: UltralyticsDataset, i: int, rect_mode: bool = False) -> tuple:  # type: ignore[override]
        return self._load(i, not rect_mode, rect_mode)


class ComposeView(View):
    __slots__ = ()

    @property
    def transforms(self: UltralyticsDataset) -> list:
        return [self.planner.view(transform) for transform in vars(self)["transforms"]]


class MixView(View):
    """Wrap a transform that takes further images from the data set."""

    __slots__ = ()

    @property
    def dataset(self: UltralyticsDataset) -> UltralyticsDataset:
        return self.planner.dataset

    @property
    def pre_transform(self: UltralyticsDataset) -> object:
        return self.planner.view(vars(self)["pre_transform"])


MIXINS: dict[tuple[str, str], type] = {
    (DATASET, "YOLODataset"): DatasetView,
    ("ultralytics.models.rtdetr.val", "RTDETRDataset"): StretchedView,
    (AUGMENT, "Compose"): ComposeView,
    **{(AUGMENT, name): MixView for name in ("Mosaic", "CopyPaste", "MixUp", "CutMix")},
    **{(AUGMENT, name): View for name in ("RandomPerspective", "RandomHSV", "RandomFlip", "LetterBox", "Format")},
}


def obstacle_in_dataset(dataset: UltralyticsDataset) -> Obstacle | None:
    """Return why a data set's images are left to the original code; None where they are not."""
    cls = type(dataset)
    view = view_class(cls)
    if view is None or not issubclass(view, DatasetView):
        return Obstacle(f"{cls.__name__} is not Ultralytics' YOLODataset.")
    if changed := {"load_image", "collate_fn", "get_image_and_label"} & vars(dataset).keys():
        return Obstacle(f"{min(changed)} of this data set has been replaced.")
    if (channels := dataset.channels) != CHANNELS:
        return Obstacle(f"its images have {channels} channel{'s' if channels > 1 else ''}, not {CHANNELS}.")
    return _obstacle_in(dataset.transforms, dataset)


def _obstacle_in(transform: object, dataset: UltralyticsDataset) -> Obstacle | None:
    cls = type(transform)
    view, name = view_class(cls), cls.__name__
    if view is None:
        if (cls.__module__, cls.__qualname__) != (AUGMENT, "Albumentations"):
            return Obstacle(f"{name} is not a known transform.")
        unused = vars(transform).get("transform") is None
        return None if unused else Obstacle("Albumentations, which is installed, changes images.")
    if issubclass(view, ComposeView):
        return next(filter(None, (_obstacle_in(step, dataset) for step in vars(transform)["transforms"])), None)
    if any(callable(value) and key.startswith(("apply_", "get_")) for key, value in vars(transform).items()):
        return Obstacle(f"a method of its {name} has been replaced.")
    if issubclass(view, MixView):
        first = vars(transform)["pre_transform"]
        if vars(transform)["dataset"] is not dataset:
            return Obstacle(f"its {name} takes images from another data set.")
        return None if first is None else _obstacle_in(first, dataset)
    return None
