"""Ultralytics' transforms with pixels put off: stock's code draws and moves labels, and a :class:`Deferred` notes what to do.

For the time in which a batch is planned, each transform is seen through an object of a derived class that shares its
attributes, so that nothing of stock is replaced. What one pass over the pixels cannot do, stock's code does on pixels that
are made for it.
"""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import cv2
import numpy as np

from torch_fastdet.loader.memory import CHANNELS, PictureMemory
from torch_fastdet.loader.plan import (
    AFFINE,
    FLIP_LEFT_RIGHT,
    FLIP_UP_DOWN,
    KEEP_BGR,
    NO_WARP,
    PERSPECTIVE,
    Layer,
    Picture,
    Source,
    finish,
)

AUGMENT, DATASET = "ultralytics.data.augment", "ultralytics.data.dataset"
GREY = 114
_LEVELS = np.arange(0, 256, dtype=np.float64)


class Deferred:
    """In ``labels["img"]`` in place of pixels: the plan of a picture."""

    ndim = 3

    def __init__(self, picture: Picture) -> None:
        self.picture = picture

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.picture.height, self.picture.width, CHANNELS

    def layer(self) -> Layer | None:
        """Its only layer, where nothing follows on that."""
        picture = self.picture
        plain = len(picture.layers) == 1 and picture.tables is None and not picture.flags
        return picture.layers[0] if plain else None

    def canvas(self) -> Layer | None:
        """Its only layer, where that is neither mapped nor pasted on."""
        layer = self.layer()
        return layer if layer is not None and layer.warp == NO_WARP and layer.mask is None else None

    def source(self) -> Source | None:
        """The picture that it is, where nothing has been done to that."""
        canvas = self.canvas()
        if canvas is None or len(canvas.placements) != 1:
            return None
        source, *where = canvas.placements[0]
        return source if where == [0, 0, 0, 0, canvas.width, canvas.height] else None

    def pixels(self, memory: PictureMemory) -> np.ndarray:
        """uint8, HWC, BGR."""
        source = self.source()
        if source is None:
            source = finish(self.picture, memory).layers[0].placements[0][0]
        found = source.pixels if source.pixels is not None else memory.get(source.index)
        assert found is not None
        return found


def of_layer(layer: Layer, height: int, width: int) -> Deferred:
    return Deferred(Picture(height, width, [layer]))


def of_source(source: Source) -> Deferred:
    height, width = source.height, source.width
    return of_layer(Layer(height, width, [(source, 0, 0, 0, 0, width, height)]), height, width)


def of_pixels(pixels: np.ndarray) -> Deferred:
    if pixels.dtype != np.uint8 or pixels.shape[2:] != (CHANNELS,):
        raise RuntimeError(
            f"loader_optim: a picture is {pixels.dtype} of shape {pixels.shape}, but uint8 (height, width, {CHANNELS}) is "
            "expected; train without loader_optim"
        )
    height, width = pixels.shape[:2]
    return of_source(Source(-1, height, width, np.ascontiguousarray(pixels)))


class Planner:
    """Plans the items of a data set.

    Args:
        dataset: a ``YOLODataset`` that :func:`cannot_plan` has nothing against.
        memory: where its decoded pictures are kept.
    """

    def __init__(self, dataset: Any, memory: PictureMemory) -> None:
        self.memory = memory
        self.dataset = self.view(dataset)

    def item(self, index: int) -> dict[str, Any]:
        """What stock's ``dataset[index]`` returns, with a :class:`Picture` under ``img``."""
        return self.dataset[index]

    def view(self, thing: Any) -> Any:
        """``thing``, with the same attributes, but with pixels put off; what touches none is returned as it is."""
        cls = view_class(type(thing))
        if cls is None:
            return thing
        seen: Any = object.__new__(cls)
        seen.__dict__ = thing.__dict__
        seen.planner = self
        return seen


def view_class(stock: Any) -> Any:
    """The class of ``stock`` with pixels put off; None for all but the known classes of Ultralytics."""
    mixin = MIXINS.get((stock.__module__, stock.__qualname__))
    defined = mixin is not None and getattr(sys.modules[stock.__module__], stock.__qualname__) is stock
    return _derived(stock, mixin) if defined else None


@functools.cache
def _derived(stock: Any, mixin: Any) -> type:
    return type(stock.__qualname__, (mixin, stock), {"__slots__": ("planner",)})


# What each class does in place of pixels ------------------------------------------------------------------------------


class DatasetView:
    __slots__ = ()

    def load_image(self: Any, i: int, rect_mode: bool = True, resize_short: bool = False) -> tuple:
        memory = self.planner.memory
        usual = rect_mode and not resize_short
        if usual and self.ims[i] is None and memory.has(i):
            original, size = memory.original(i), memory.shape(i)
            self._note_loaded(i, memory.get(i), original, size)
        else:
            pixels, original, size = super().load_image(i, rect_mode, resize_short)  # type: ignore[misc]
            if not usual or not memory.put(i, pixels, original):
                return of_pixels(pixels), original, size
            if self.ims[i] is pixels:
                self.ims[i] = memory.get(i)  # this process needs none of its own
        return of_source(Source(int(i), *size)), original, size

    def _note_loaded(self: Any, i: int, picture: np.ndarray, original: tuple, size: tuple) -> None:
        """Mosaics choose among the pictures that were loaded last: which those are is part of stock's random draws."""
        if not self.augment or self.cache == "ram":
            return
        self.ims[i], self.im_hw0[i], self.im_hw[i] = picture, original, size
        self.buffer.append(i)
        if len(self.buffer) >= max(2, self.max_buffer_length):
            oldest = self.buffer.pop(0)
            for kept in (self.ims, self.im_hw0, self.im_hw):
                kept[oldest] = None

    @property
    def transforms(self: Any) -> Any:
        return self.planner.view(vars(self)["transforms"])


class ComposeView:
    __slots__ = ()

    @property
    def transforms(self: Any) -> list:
        return [self.planner.view(transform) for transform in vars(self)["transforms"]]


class PixelView:
    """A transform whose ``apply_image`` is put off."""

    __slots__ = ()

    def by_stock(self: Any, labels: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        """Stock's ``apply_image`` on pixels."""
        for holder, name in ((params, "labels2_img"), *((x, "img") for x in (labels, *labels.get("mix_labels", ())))):
            if isinstance(holder.get(name), Deferred):
                holder[name] = holder[name].pixels(self.planner.memory).copy()  # stock may write to them
        labels = super().apply_image(labels, params)  # type: ignore[misc]
        labels["img"] = of_pixels(labels["img"])
        return labels

    def pixels_of(self: Any, deferred: Deferred) -> Deferred:
        """The same picture, made now: anything can follow on it."""
        return of_pixels(deferred.pixels(self.planner.memory))


class MixView(PixelView):
    """A transform that takes further pictures from the data set."""

    __slots__ = ()

    @property
    def dataset(self: Any) -> Any:
        return self.planner.dataset

    @property
    def pre_transform(self: Any) -> Any:
        return self.planner.view(vars(self)["pre_transform"])


class MosaicView(MixView):
    __slots__ = ()

    def apply_image(self: Any, labels: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        sources = [item["labels_patch"]["img"].source() for item in params["layout"]]
        if self.n != 4 or any(source is None for source in sources):
            return self.by_stock(labels, params)
        layer = Layer(self.imgsz * 2, self.imgsz * 2)
        for item, source in zip(params["layout"], sources, strict=True):
            x, y = item["x1a"], item["y1a"]
            layer.placements.append((source, item["x1b"], item["y1b"], x, y, item["x2a"] - x, item["y2a"] - y))
        labels["img"] = of_layer(layer, layer.height, layer.width)
        return labels


class CopyPasteView(MixView):
    __slots__ = ()

    def apply_image(self: Any, labels: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        if not len(params["selected"]):
            return labels
        deferred = labels["img"]
        if params["labels2_img"] is not None:
            return self.by_stock(labels, params)
        height, width, _ = deferred.shape
        # Stock draws the mask while it pastes.
        super().apply_image({"img": np.zeros((height, width, 1), np.uint8)}, params)  # type: ignore[misc]
        if params["im_new"].any():
            deferred = deferred if deferred.canvas() is not None else self.pixels_of(deferred)
            deferred.canvas().mask = params["im_new"]
            labels["img"] = deferred
        return labels


class RandomPerspectiveView(PixelView):
    __slots__ = ()

    def apply_image(self: Any, labels: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        layer = labels["img"].layer()
        if layer is None or layer.warp != NO_WARP:
            layer = self.pixels_of(labels["img"]).canvas()
        layer.warp = PERSPECTIVE if self.perspective else AFFINE
        layer.matrix = params["M"].astype(np.float64)
        width, height = params["size"]
        labels["img"] = of_layer(layer, height, width)
        labels["resized_shape"] = (height, width)
        return labels


class MixUpView(MixView):
    __slots__ = ()

    def apply_image(self: Any, labels: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        first, second = labels["img"], labels["mix_labels"][0]["img"]
        if first.shape != second.shape or first.layer() is None or second.layer() is None:
            return self.by_stock(labels, params)
        height, width, _ = first.shape
        labels["img"] = Deferred(Picture(height, width, [first.layer(), second.layer()], blend=params["r"]))
        return labels


class CutMixView(MixView):
    __slots__ = ()

    def apply_image(self: Any, labels: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        return labels if params.get("skip") else self.by_stock(labels, params)


class RandomHSVView(PixelView):
    __slots__ = ()

    def apply_image(self: Any, labels: dict[str, Any], params: dict[str, Any] | None = None) -> dict[str, Any]:
        if not (self.hgain or self.sgain or self.vgain):
            return labels
        picture = labels["img"].picture
        if picture.tables is not None or picture.flags:
            labels["img"] = self.pixels_of(labels["img"])
            picture = labels["img"].picture
        hue, saturation, value = np.random.uniform(-1, 1, 3) * [self.hgain, self.sgain, self.vgain]
        tables = np.empty((3, 256), dtype=np.uint8)
        tables[0] = (_LEVELS + hue * 180) % 180
        tables[1] = np.clip(_LEVELS * (saturation + 1), 0, 255)
        tables[2] = np.clip(_LEVELS * (value + 1), 0, 255)
        tables[1, 0] = 0  # grey stays grey
        picture.tables = tables
        return labels


class RandomFlipView(PixelView):
    __slots__ = ()

    def apply_image(self: Any, labels: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        if params["flip"]:
            up_down = params["direction"] == "vertical"
            labels["img"].picture.flags ^= FLIP_UP_DOWN if up_down else FLIP_LEFT_RIGHT
        return labels


class LetterBoxView(PixelView):
    __slots__ = ()

    def apply_image(self: Any, labels: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        top, bottom, left, right = (params[side] for side in ("top", "bottom", "left", "right"))
        source = labels["img"].source()
        if source is None or self.padding_value != GREY or min(top, bottom, left, right) < 0:
            return self.by_stock(labels, params)
        width, height = params["new_unpad"]
        if (source.width, source.height) != (width, height):
            pixels = labels["img"].pixels(self.planner.memory)
            source = Source(-1, height, width, cv2.resize(pixels, (width, height), interpolation=self.interpolation))
        layer = Layer(top + height + bottom, left + width + right, [(source, 0, 0, left, top, width, height)])
        labels["img"] = of_layer(layer, layer.height, layer.width)
        labels["resized_shape"] = params["new_shape"]
        return labels


class FormatView(PixelView):
    __slots__ = ()

    def _format_img(self: Any, img: Deferred) -> Picture:
        if not random.uniform(0, 1) > self.bgr:
            img.picture.flags |= KEEP_BGR
        return img.picture


MIXINS: dict[tuple[str, str], type] = {
    (DATASET, "YOLODataset"): DatasetView,
    (AUGMENT, "Compose"): ComposeView,
    (AUGMENT, "Mosaic"): MosaicView,
    (AUGMENT, "CopyPaste"): CopyPasteView,
    (AUGMENT, "RandomPerspective"): RandomPerspectiveView,
    (AUGMENT, "MixUp"): MixUpView,
    (AUGMENT, "CutMix"): CutMixView,
    (AUGMENT, "RandomHSV"): RandomHSVView,
    (AUGMENT, "RandomFlip"): RandomFlipView,
    (AUGMENT, "LetterBox"): LetterBoxView,
    (AUGMENT, "Format"): FormatView,
}


def cannot_plan(dataset: Any) -> str | None:
    """Why a data set's pictures are stock's to make; None where they are not."""
    cls = type(dataset)
    view = view_class(cls)
    if view is None or not issubclass(view, DatasetView):
        return f"{cls.__name__} is not Ultralytics' YOLODataset."
    if changed := {"load_image", "collate_fn", "get_image_and_label"} & vars(dataset).keys():
        return f"{min(changed)} of this data set has been replaced."
    if dataset.channels != CHANNELS:
        return f"its pictures have {dataset.channels} channel{'s' if dataset.channels > 1 else ''}, not {CHANNELS}."
    return _unknown_transform(dataset.transforms, dataset)


def _unknown_transform(transform: Any, dataset: Any) -> str | None:
    cls = type(transform)
    view, name = view_class(cls), cls.__name__
    if view is None:
        if (cls.__module__, cls.__qualname__) != (AUGMENT, "Albumentations"):
            return f"{name} is not a known transform."
        if vars(transform).get("transform") is not None:
            return "Albumentations, which is installed, changes pictures."
        return None
    if issubclass(view, ComposeView):
        return next(filter(None, (_unknown_transform(step, dataset) for step in vars(transform)["transforms"])), None)
    if any(callable(value) and key.startswith(("apply_", "get_")) for key, value in vars(transform).items()):
        return f"a method of its {name} has been replaced."
    if issubclass(view, MixView):
        first = vars(transform)["pre_transform"]
        if vars(transform)["dataset"] is not dataset:
            return f"its {name} takes pictures from another data set."
        return None if first is None else _unknown_transform(first, dataset)
    return None
