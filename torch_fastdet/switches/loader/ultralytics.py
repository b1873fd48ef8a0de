"""Runs Ultralytics' loaders with plans instead of pixels. Data sets, transforms and samplers stay its own objects."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from torch_fastdet._say import warn
from torch_fastdet.images.image_memory import CHANNELS, ImageMemory
from torch_fastdet.images.jpeg_files import Files
from torch_fastdet.images.loop import Ahead, PlanBatches, PlannedLoading
from torch_fastdet.images.shared_by_ranks import shared_by_ranks
from torch_fastdet.images.unread import sharing, sizes
from torch_fastdet.memory import UNLIMITED, host_budget
from torch_fastdet.patching.evidence import Obstacle, fingerprint
from torch_fastdet.patching.protocols import Function, Loader, Stock, UltralyticsDataset
from torch_fastdet.patching.replace import around, in_place_of, original
from torch_fastdet.patching.switch import Active
from torch_fastdet.switches.frameworks import ALL_READ
from torch_fastdet.switches.loader import labels
from torch_fastdet.switches.loader.deferred import AS_STOCK, Planner, obstacle_in_dataset, view_class

# These are fingerprints of the code of Ultralytics 8.4.184 to 8.4.190 that this switch replaces or relies on.
RTDETR = "ultralytics.models.rtdetr.val"  # imported by who trains one
KNOWN = {
    ("ultralytics.data.base", "BaseDataset.load_image"): "f790c565",
    ("ultralytics.data.base", "BaseDataset.cache_images"): "2ffd3a08",
    ("ultralytics.data.base", "BaseDataset.set_rectangle"): "17bc2022",
    ("ultralytics.data.dataset", "YOLODataset.collate_fn"): "146beee5",
    ("ultralytics.data.build", "InfiniteDataLoader"): "7b688ec0",
    (RTDETR, "RTDETRDataset.load_image"): "f18eba54",
}


def obstacle_in_code(verdict: str) -> Obstacle | None:
    """Return the ``verdict`` on the first name of Ultralytics whose code is not known here; None where all is."""
    for (module, name), known in KNOWN.items():
        if module == RTDETR and module not in sys.modules:
            continue
        found: Stock = importlib.import_module(module)
        for part in name.split("."):
            found = original(found, part)
        if _fingerprint(found) != known:
            return Obstacle(f"{module}.{name} {verdict}")
    return None


def obstacle_in_read_code(_: object) -> Obstacle | None:
    return obstacle_in_code(f"is not that of {ALL_READ}.")


_fingerprint = functools.cache(fingerprint)


# Decoded images -----------------------------------------------------------------------------------------------------

# Maps a data set to its memory, and to what the memory depends on.
_memories: weakref.WeakKeyDictionary[object, tuple[list[str], ImageMemory | None]] = weakref.WeakKeyDictionary()
# Maps a data set to its files' (height, width). Sorting for rectangular batches drops these from its labels.
_file_shapes: weakref.WeakKeyDictionary[object, dict[str, tuple[int, int]]] = weakref.WeakKeyDictionary()


def memory_of(
    dataset: UltralyticsDataset, budget: Callable[[], int] = host_budget, as_files: bool = False
) -> ImageMemory | None:
    """Return the memory for a data set's images, None where the system refuses it; a new one keeps JPEG files where they are asked for."""
    # Decoded images depend on these. An image's number in the memory is its position in the files.
    wanted = [str(dataset.imgsz), *dataset.im_files]
    found, memory = _memories.get(dataset, (None, None))
    if found != wanted:
        shapes, files = _shapes(dataset)
        memory = shared_by_ranks(wanted, shapes, budget, files if as_files else None)
        _memories[dataset] = wanted, memory
    return memory


def _shapes(dataset: UltralyticsDataset) -> tuple[list[tuple[int, int]], Files]:
    """Return the sizes that ``load_image`` will give the images, or somewhat more; and the JPEG files."""
    side = max(dataset.imgsz) if isinstance(dataset.imgsz, (tuple, list)) else dataset.imgsz
    known = _file_shapes.get(dataset, {})
    paths = [label["im_file"] for label in dataset.labels]
    found = [label.get("shape") or known.get(label["im_file"]) for label in dataset.labels]
    originals = [size or (side, side) for size in found]
    shapes, ways = sizes(type(dataset), dataset, originals, side)
    return shapes, Files.of([path if size else "" for path, size in zip(paths, found, strict=True)], originals, ways)


class SharedImages:
    """Stand in ``dataset.ims`` instead of the original packed cache: all images of a data set, which other processes share."""

    def __init__(self, memory: ImageMemory, others: dict[int, np.ndarray], stock: type) -> None:
        self.memory = memory
        self.others = others
        self.stock = stock
        #: True while its results are only used for plans. Other callers may draw on the images, so they get copies.
        self.is_planned = False

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, i: int) -> np.ndarray:
        i = range(len(self))[i]
        image = self.memory.get(i)
        if image is None:
            return self.others[i]
        return image if self.is_planned else image.copy()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        if sys.modules["multiprocessing.context"].get_spawning_popen() is not None:
            return SharedImages, (self.memory, self.others, self.stock)
        return self.stock, ([self[i] for i in range(len(self))],)  # copies and files hold the original


@around
def cache_images(_: object, stock: Function, self: UltralyticsDataset) -> None:
    """Decode into the shared memory in ``BaseDataset.cache_images`` for ``cache="ram"``."""
    cls: type = type(self)
    known = self.cache == "ram" and view_class(cls) is not None and self.channels == CHANNELS
    memory = memory_of(self, lambda: UNLIMITED) if known else None
    if memory is None:
        stock(self)
        return
    stock(sharing(_filling_class(cls), self.__dict__, memory=memory))


@functools.cache
def _filling_class(stock: type) -> Any:

    class Filling(stock):
        __slots__ = ("memory",)

        def load_image(self, i: int, *args: object, **kwargs: object) -> tuple:
            return self.memory.load(super().load_image, i, *args, **kwargs)

        def _ImageCache(self, images: list[np.ndarray]) -> SharedImages:
            others = {i: image for i, image in enumerate(images) if not self.memory.has(i)}
            return SharedImages(self.memory, others, super()._ImageCache)

    return Filling


@around
def set_rectangle(_: object, stock: Function, self: UltralyticsDataset) -> None:
    """Keep the images' sizes, which ``BaseDataset.set_rectangle`` drops."""
    if view_class(type(self)) is not None:
        _file_shapes[self] = {label["im_file"]: label["shape"] for label in self.labels}
    stock(self)


# Loaders --------------------------------------------------------------------------------------------------------------


class PlannedLoader:
    """Go in front of the original ``InfiniteDataLoader``: its processes plan, and batches are made of that.

    Copies plan too. Deep copies and files hold the original loader, without what is annotated here.
    """

    # This is None in another loader that somebody creates of this class.
    _plans: PlannedLoading | None = None
    _images: tuple[list[str], object]
    _ahead: Ahead | None = None
    #: True if it has no plans, or if somebody gave it another collate_fn, which needs images.
    _as_stock: bool = False

    def __copy__(self) -> object:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        kept = {name: value for name, value in vars(self).items() if name not in PlannedLoader.__annotations__}
        return object.__new__, type(self).__bases__[1:], kept

    def _get_iterator(self: Loader) -> object:
        obstacle = None if self._plans is None else _obstacle_in_collate_fn(self)
        self._as_stock = self._plans is None or obstacle is not None
        if self._as_stock:
            if obstacle is not None:
                warn(AS_STOCK.format(obstacle))
            return super()._get_iterator()  # type: ignore[misc]
        if (obstacle := obstacle_in_dataset(self.dataset)) is not None:
            warn(AS_STOCK.format(obstacle))
        # This loader's processes work on plans. The attributes of the original loader stay as users expect them.
        loader = DataLoader(
            Planner(self.dataset, self._plans.memory, *self._images).dataset,
            batch_sampler=PlanBatches(self.batch_sampler),
            num_workers=self.num_workers,
            collate_fn=self._plans.collate(self.collate_fn),
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            generator=self.generator,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
        )
        return iter(loader)

    def __iter__(self: Loader) -> Iterator[dict]:
        if self.iterator is None:
            self.iterator = self._get_iterator()
        batches = self._ahead or self.iterator
        if not self._as_stock and self._ahead is None:
            batches = self._plans.batches(self.iterator, limited=True)
            self._ahead = batches if isinstance(batches, Ahead) else None
        if self._ahead is not None:
            # When an epoch ends, batches are drawn only as far as by the original loader, which may then draw again.
            self._ahead.allow(len(self))
        for _ in range(len(self)):
            if not self._as_stock:
                self._plans.count_batch()
            yield next(batches)

    def _stop(self: Loader) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def close(self: Loader) -> None:
        self._stop()
        super().close()  # type: ignore[misc]

    def __del__(self: Loader) -> None:
        with contextlib.suppress(Exception):
            self._stop()
        super().__del__()  # type: ignore[misc]


@functools.cache
def _loader_class(stock: type) -> type:
    return type(stock.__name__, (PlannedLoader, stock), {"__module__": __name__})


def build_dataloader(active: Active, stock: Function, build: Stock) -> Callable[..., object]:
    """Return Ultralytics' ``build_dataloader``, whose loaders plan where they can."""
    base = importlib.import_module("ultralytics.data.base").BaseDataset
    for name, make in (("cache_images", cache_images), ("set_rectangle", set_rectangle)):
        active.replace(base, name, make(active, vars(base)[name]))
    scans = importlib.import_module("ultralytics.data.dataset")
    labels.scan_by_threads(
        active, scans, "ThreadPool", scans.YOLODataset, labels.ultralytics_result, labels.ULTRALYTICS
    )
    signature, stock_loader = inspect.signature(stock), build.InfiniteDataLoader

    @in_place_of(stock)
    def build_dataloader(*args: object, **kwargs: object) -> object:
        loader: Loader = stock(*args, **kwargs)
        if type(loader) is not stock_loader:
            return loader
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        obstacle = (
            obstacle_in_dataset(loader.dataset)
            or _obstacle_in_collate_fn(loader)
            or obstacle_in_code("has been replaced.")
        )
        if obstacle is None:
            return plan_loader(loader, arguments.arguments["device"]) or loader
        warn(AS_STOCK.format(obstacle))
        return loader

    return build_dataloader


def _obstacle_in_collate_fn(loader: Loader) -> Obstacle | None:
    kept = loader.collate_fn is type(loader.dataset).collate_fn
    return None if kept else Obstacle("its collate_fn is not the data set's.")


def plan_loader(loader: Loader, device: object) -> Loader:
    """Return a loader that does the work of ``loader``, an original one that has not begun, by plans; None where it gets no memory."""
    kind, _, number = str(device).partition(":")  # stock takes any text
    on_gpu = kind == "cuda" and torch.cuda.is_available()
    gpu = torch.device("cuda", int(number)) if on_gpu and number.isdigit() else None
    memory = memory_of(loader.dataset, as_files=on_gpu)
    if memory is None:
        return None
    cls: type = type(loader)
    planned: Any = object.__new__(_loader_class(cls))
    vars(planned).update(vars(loader))
    planned._plans = PlannedLoading(memory, loader.num_workers, on_gpu, gpu)
    planned._images = list(loader.dataset.im_files), loader.dataset.imgsz
    return planned
