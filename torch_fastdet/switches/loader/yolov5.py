"""Runs YOLOv5's data set and loaders with plans instead of pixels."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing.context
import os
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader

from torch_fastdet._say import warn
from torch_fastdet._torch import private
from torch_fastdet._torch.private import group_size
from torch_fastdet.images.image_memory import ImageMemory
from torch_fastdet.images.jpeg_files import Files
from torch_fastdet.images.loop import PlanBatches, PlannedLoading
from torch_fastdet.images.plan import Indices
from torch_fastdet.images.recorder import Recorder
from torch_fastdet.images.shared_by_ranks import shared_by_ranks
from torch_fastdet.images.unread import sharing, sizes
from torch_fastdet.memory import UNLIMITED, host_budget
from torch_fastdet.patching.by_name import CopiedAsItIs, filed_as
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.protocols import Function, Names, Stock, YOLOv5Dataset
from torch_fastdet.patching.replace import around
from torch_fastdet.patching.switch import Active
from torch_fastdet.switches.loader import labels


class Planner:
    """Make the plans of the items of a ``LoadImagesAndLabels``, by its own code on images that have no pixels."""

    def __init__(self, dataset: YOLOv5Dataset) -> None:
        self.recorder = Recorder(dataset.memory, "YOLOv5")
        methods = self.recorder.copies.methods(type(dataset))
        cls = type("LoadImagesAndLabels", (_Recording, type(dataset)), {**methods, "__slots__": ("recorder",)})
        self._recording = sharing(cls, dataset.__dict__, recorder=self.recorder)

    def items(self, indices: list[int], dataset: YOLOv5Dataset) -> list:
        return self.recorder.items(
            lambda: [self._item(index) for index in indices], lambda: [dataset[index] for index in indices]
        )

    def _item(self, index: int) -> tuple:
        image, *rest = self._recording[index]
        return self.recorder.plan_of(image), *rest


class _Recording:
    """Go in front of a data set's class: its ``load_image`` returns an image without pixels."""

    __slots__ = ()

    def load_image(self: YOLOv5Dataset, i: int) -> tuple:
        if not self.remembers(i):
            pixels, original, size = super().load_image(i)  # type: ignore[misc]
            if not self.remembers(i):
                return self.recorder.of_pixels(pixels), original, size
        image = self.recorder.of_memory(i)
        return image, self.recorder.memory.original(i), image.shape[:2]


# Replacements of the original names ---------------------------------------------------------------------------------------


@functools.cache
def dataset_class(stock: type) -> type:
    """Return ``LoadImagesAndLabels``, or the same with masks, with a memory that all processes share, and with plans for those who ask for them."""

    class LoadImagesAndLabels(stock):
        torch_fastdet_stock = stock
        _planner: Planner | None = None
        _memory: ImageMemory | None = None
        #: The size and augment that the memory was made for, or None before it is requested.
        _memory_is_of: tuple[int, bool] | None = None
        _all_in_memory: bool = False
        _is_cached: bool = False

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            _ = self.memory  # while other ranks wait for the first one

        @property
        def memory(self) -> ImageMemory | None:
            """Return the memory of all processes; None where the system refuses it."""
            if self._memory_is_of is None:
                self._memory = _memory_for(self, everything=self._all_in_memory)
                self._memory_is_of = self.img_size, self.augment
            return self._memory

        def remembers(self, i: int) -> bool:
            """Return whether the memory has the image as ``load_image`` gives it now; a JPEG file is read for that."""
            memory = self.memory
            assert memory is not None
            # YOLOv5's own image cache (--cache ram) keeps images in the size that they had.
            if not memory.has(i) and (os.path.exists(self.npy_files[i]) or not memory.read(i)):
                return False
            return self.ims[i] is not None or self._memory_is_current()

        def _memory_is_current(self) -> bool:
            return self._memory_is_of == (self.img_size, self.augment)

        def check_cache_ram(self, *args: object, **kwargs: object) -> bool:
            self._all_in_memory = super().check_cache_ram(*args, **kwargs)
            memory = self.memory  # now: threads load into it
            # Images that another rank has decoded take no additional memory here.
            self._is_cached = self._all_in_memory or (memory is not None and bool(memory.decoded().all()))
            return self._is_cached

        def load_image(self, i: int) -> tuple[np.ndarray, tuple[int, int], tuple[int, int]]:
            memory = self.memory
            if memory is None:
                return super().load_image(i)
            if self.ims[i] is not None:
                image, *sizes = super().load_image(i)
            elif self._memory_is_current():
                image, *sizes = memory.load(super().load_image, i)
                if self._is_cached:  # the original cache takes it
                    return image, *sizes
            else:
                return super().load_image(i)  # somebody has set another size since
            return image.copy(), *sizes  # the caller may draw on it

        def __getitems__(self, indices: list[int]) -> list:
            if isinstance(indices, Indices):
                planner = self._planner
                if planner is None or planner.recorder.memory is not self.memory:
                    self._planner = planner = Planner(self)
                return planner.items(indices, self)
            return [self[index] for index in indices]

        def __getstate__(self) -> Names:
            return {**self.__dict__, "_planner": None}

        def __reduce_ex__(self, protocol: object) -> str | tuple[object, ...]:
            if type(self) is not LoadImagesAndLabels:
                return super().__reduce_ex__(protocol)
            if multiprocessing.context.get_spawning_popen() is not None:
                return _new_dataset, (stock.__module__, stock.__name__), self.__getstate__()
            # Pickles contain the framework's class, without the attributes annotated above.
            kept = {
                name: value for name, value in vars(self).items() if name not in LoadImagesAndLabels.__annotations__
            }
            return filed_as(stock, kept)

        __copy__, __deepcopy__ = CopiedAsItIs.__copy__, CopiedAsItIs.__deepcopy__

    for base in stock.__bases__:  # a class that was made while its base was replaced
        if "torch_fastdet_stock" in vars(base):
            stock.__bases__ = (vars(base)["torch_fastdet_stock"],)
    LoadImagesAndLabels.__module__ = __name__
    LoadImagesAndLabels.__name__ = LoadImagesAndLabels.__qualname__ = stock.__name__
    return LoadImagesAndLabels


def _new_dataset(module: str, name: str) -> object:
    """Return an empty data set, in a process that may have no patch()."""
    stock: type = getattr(importlib.import_module(module), name)
    cls = dataset_class(vars(stock).get("torch_fastdet_stock", stock))
    return object.__new__(cls)


def keeps_files() -> bool:
    """Return whether JPEG files are kept instead of decoded images: where a GPU makes the batches."""
    return torch.cuda.is_available()


def _memory_for(dataset: YOLOv5Dataset, everything: bool) -> ImageMemory | None:
    """Return a memory with places for a data set's images, in the sizes that ``load_image`` will give them."""
    as_files = keeps_files() and not (everything or obstacle_in_dataset(dataset))  # else the original code wants pixels
    side, originals = dataset.img_size, [(height, width) for width, height in dataset.shapes.tolist()]
    shapes, ways = sizes(type(dataset).torch_fastdet_stock, dataset, originals, side)
    what = (str(dataset.img_size), str(dataset.augment), *dataset.im_files)
    files = Files.of(dataset.im_files, originals, ways) if as_files else None
    return shared_by_ranks(what, shapes, lambda: UNLIMITED if everything else host_budget(), files)


def obstacle_in_dataset(dataset: YOLOv5Dataset) -> Obstacle | None:
    """Return why a data set's images are left to the original code; None where they are not."""
    if "torch_fastdet_stock" not in vars(type(dataset)):
        return Obstacle(f"{type(dataset).__name__} is not YOLOv5's.")
    if getattr(dataset.albumentations, "transform", None) is not None:
        return Obstacle("Albumentations, which is installed, changes images.")
    return None


def data_loader(active: Active, stock: Stock, module: object) -> type | None:
    """Return a stand-in for ``InfiniteDataLoader``, and replace ``DataLoader``, which ``create_dataloader`` takes for --image-weights."""
    if not active.has_replaced(module, "LoadImagesAndLabels"):
        return None

    class InfiniteDataLoader(stock):
        def __init__(self, dataset: YOLOv5Dataset, *args: Stock, **kwargs: Stock) -> None:
            self._plans = _planned(dataset, kwargs)
            if self._plans is None:
                super().__init__(dataset, *args, **kwargs)
                return
            DataLoader.__init__(self, dataset, *args, **kwargs)
            object.__setattr__(self, "batch_sampler", PlanBatches(self.batch_sampler, repeat=True))
            self.iterator = DataLoader.__iter__(self)
            self._batches: Iterator[tuple] | None = None

        def __iter__(self) -> Iterator[tuple]:
            if self._plans is None:
                yield from super().__iter__()
                return
            if self._batches is None:
                self._batches = self._plans.batches(self.iterator)
            for _ in range(len(self)):
                self._plans.count_batch()
                yield next(self._batches)

    class PlanDataLoader(DataLoader):
        def __init__(self, dataset: YOLOv5Dataset, *args: Stock, **kwargs: Stock) -> None:
            self._plans = _planned(dataset, kwargs)
            super().__init__(dataset, *args, **kwargs)
            if self._plans is not None:
                object.__setattr__(self, "batch_sampler", PlanBatches(self.batch_sampler))

        def __iter__(self) -> Stock:
            batches = super().__iter__()
            return batches if self._plans is None else self._plans.batches(batches)

    PlanDataLoader.__name__ = PlanDataLoader.__qualname__ = "DataLoader"
    InfiniteDataLoader.__qualname__ = "InfiniteDataLoader"
    active.replace(module, "DataLoader", PlanDataLoader)
    return InfiniteDataLoader


def _planned(dataset: YOLOv5Dataset, options: Names) -> PlannedLoading | None:
    """Set up plans for a loader and change its options accordingly; None where YOLOv5 makes the images."""
    collate, obstacle = options.get("collate_fn"), obstacle_in_dataset(dataset)
    if obstacle is None and collate is type(dataset).collate_fn4:
        obstacle = Obstacle("--quad puts four images together.")
    if obstacle is not None:
        if hasattr(type(dataset), "torch_fastdet_stock"):
            warn(f"loader_optim: decodes each image once, and leaves the rest to YOLOv5: {obstacle}")
        return None
    if collate is not type(dataset).collate_fn or options.get("batch_size", 1) is None:
        return None  # a loader of somebody's own
    if dataset.memory is None:
        return None
    plans = PlannedLoading(dataset.memory, options.get("num_workers", 0), torch.cuda.is_available())
    options.update(collate_fn=plans.collate(collate), pin_memory=False)
    return plans


def data_set(active: Active, stock: type, module: Stock) -> type:
    labels.scan_by_threads(active, module, "Pool", stock, labels.yolov5_result, labels.YOLOV5)
    labels.hash_by_threads(active, module)
    return dataset_class(stock)


def data_set_of_masks(active: Active, stock: type, module: Stock) -> type | None:
    boxes = sys.modules[module.__name__.replace(".segment.", ".")]
    if not active.has_replaced(boxes, "InfiniteDataLoader"):
        return None
    active.replace(module, "DataLoader", boxes.DataLoader)
    return dataset_class(stock)


# Ranks wait for the first one's scan of labels in the store of their process group, not in a collective with a timeout -----

#: The timeout in seconds, which is that of Ultralytics' whole process group.
LONGEST = 3 * 3600.0


def meet() -> None:
    """Wait until each rank of the default group is here."""
    size = group_size()
    if size == 1:
        return
    store = private.default_store()
    arrived = store.add("torch_fastdet/arrived", 1)
    all_are_here = f"torch_fastdet/meeting_{(arrived - 1) // size}"
    if arrived % size == 0:
        store.set(all_are_here, "1")
    end = time.monotonic() + LONGEST
    while not store.check([all_are_here]):  # store.wait() would not see Ctrl-C
        if time.monotonic() > end:
            raise TimeoutError(f"not all of the {size} ranks came within {LONGEST / 3600:g} hours")
        time.sleep(0.05)


@around
@contextlib.contextmanager
def torch_distributed_zero_first(_: object, stock: Function, local_rank: int) -> Iterator[None]:
    """Come to the barrier of ``torch_distributed_zero_first`` when the first rank of each machine is ready."""
    if local_rank > 0:
        meet()
    with stock(local_rank):
        yield
        if local_rank == 0:
            meet()


@around
def smart_DDP(_: object, stock: Function, model: object) -> object:
    """Wait in ``smart_DDP``, which the others reach while rank 0 reads the validation set and checks anchors."""
    meet()
    return stock(model)
