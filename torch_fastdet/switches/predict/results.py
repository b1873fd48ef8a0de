"""Keeps the image of Ultralytics' ``Results`` on the GPU until somebody reads it.

While the switch is on, ``Results.orig_img`` is a property. It finds the array in the object's own attributes, where Ultralytics keeps it,
or a :class:`Pixels`, which becomes the array. So the class stays Ultralytics' own, and pickles and copies hold arrays.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, SupportsIndex

import cv2
import numpy as np
import torch
from torch import Tensor

from torch_fastdet.patching.protocols import Function, Results, Stock
from torch_fastdet.patching.replace import around

NAME = "orig_img"
_recent: deque[list[weakref.ref[Pixels]]] = deque()  # batches whose pixels are on a GPU
_one_thread = threading.Lock()


class Pixels:
    """Hold an image of a JPEG file, decoded on the GPU behind the event ``ready``.

    After two further batches the pixels are freed. Then the file's bytes, which take less memory than an array, are decoded by OpenCV,
    which gives the same pixels.
    """

    __slots__ = "__weakref__", "_array", "_file", "_ready", "pixels", "shape"

    def __init__(self, pixels: Tensor, file: Tensor, ready: torch.cuda.Event | None = None) -> None:
        self.shape: tuple[int, ...] = tuple(pixels.shape)
        self.pixels: Tensor | None = pixels
        self._file: Tensor | None = file
        self._ready = ready
        self._array: np.ndarray | None = None

    def numpy(self) -> np.ndarray:
        """Return the image as an array, the same one each time."""
        if self._array is None:
            pixels, file, array = self.pixels, self._file, None  # another thread may be here, too
            if pixels is not None:
                if self._ready is not None:
                    self._ready.synchronize()
                array = pixels.cpu().numpy().copy() if pixels.device.type == "cpu" else pixels.cpu().numpy()
            elif file is not None:
                array = cv2.imdecode(file.numpy(), cv2.IMREAD_COLOR)
            with _one_thread:
                self._array = array if self._array is None else self._array
            self._file = None
        assert self._array is not None
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype)  # numpy.array(images) does not ask Images

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return self.numpy().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: object) -> np.ndarray:
        return self.numpy().copy()


def keep_two_batches(images: Iterable[object]) -> None:
    """Note a batch that is launched, and free the pixels of batches before the last two that were."""
    with _one_thread:
        _recent.append([weakref.ref(image) for image in images if isinstance(image, Pixels)])
        while len(_recent) > 3:
            for ref in _recent.popleft():
                if (image := ref()) is not None:
                    image.pixels = None


class Images(list):
    """Hold the images of a batch. Callbacks see arrays."""

    touched = False  # whether somebody has read an array, and may have changed it

    @property
    def held(self) -> list[Any]:
        """Return the images as they are: arrays, and :class:`Pixels`."""
        return list(super().__iter__())

    def _array(self, image: Any) -> object:
        self.touched = True
        return image.numpy() if isinstance(image, Pixels) else image

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return [self._array(each) for each in found] if isinstance(index, slice) else self._array(found)

    def __setitem__(self, index: Any, value: object) -> None:
        self.touched = True
        super().__setitem__(index, value)

    def __iter__(self) -> Iterator[Any]:
        return map(self._array, super().__iter__())

    def __radd__(self, other: list[Any]) -> list[Any]:
        return other + list(self)

    def __reduce_ex__(self, _: SupportsIndex) -> tuple[object, ...]:
        return list, (list(self),)


def _of_arrays(name: str) -> Function:
    method: Function = getattr(list, name)

    @functools.wraps(method)
    def method_of_arrays(self: Images, *arguments: object, **options: object) -> object:
        self[:] = self[:]
        return method(self, *arguments, **options)

    return method_of_arrays


_OPERATORS = "add", "iadd", "mul", "rmul", "imul", "delitem", "contains", "reversed", "repr"
_METHODS = "append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"
for _name in (*(f"__{name}__" for name in _OPERATORS), *_METHODS):
    setattr(Images, _name, _of_arrays(_name))


def _missing(result: Results) -> AttributeError:
    return AttributeError(f"'{type(result).__name__}' object has no attribute '{NAME}'")


def read(result: Results) -> object:
    """Return a result's array, which it holds from now on."""
    try:
        value = result.__dict__[NAME]
    except KeyError:
        raise _missing(result) from None
    if isinstance(value, Pixels):
        value = result.__dict__[NAME] = value.numpy()
    return value


def _write(result: Results, value: object) -> None:
    result.__dict__[NAME] = value


def _erase(result: Results) -> None:
    if NAME not in vars(result):
        raise _missing(result)
    del result.__dict__[NAME]


def image_property() -> property:
    return property(read, _write, _erase)


@around
def renew(_: object, stock: Function, self: Results) -> object:
    """Run ``Results.new``, from which ``cpu()``, ``to()`` and slices come, without reading the image."""
    return stock(SimpleNamespace(**vars(self)) if isinstance(vars(self)[NAME], Pixels) else self)


def read_all(results: type, parts: Stock) -> None:
    """Give each object of the class ``results`` its array, before the property goes. Copies have their own attributes.

    Who makes results meanwhile finds ``parts`` undone, and reads them.
    """
    parts.undone = True
    images = [each for each in gc.get_objects() if type(each) is Pixels] if _recent else []
    for holder in gc.get_referrers(*images) if images else ():
        attributes = vars(holder) if isinstance(holder, results) else holder
        if type(attributes) is dict and isinstance(image := attributes.get(NAME), Pixels):
            attributes[NAME] = image.numpy()
