"""Runs a framework's own ``load_image`` on files that are not read, for what it says and notes of an image of a known size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cv2

from torch_fastdet._say import warn
from torch_fastdet.images.jpeg_files import AREA, AS_IT_IS, CHANNELS, LINEAR, OTHERWISE
from torch_fastdet.images.recorder import recording_module
from torch_fastdet.patching.protocols import Names
from torch_fastdet.patching.replace import with_names

Size = tuple[int, int]
WAYS = {cv2.INTER_LINEAR: LINEAR, cv2.INTER_AREA: AREA}


class Unread:
    """Stand for an image that has a size (height, width) and no pixels. It is its own file, too, and its .npy file, which is not there."""

    __slots__ = ("shape", "way")
    ndim = 3

    def __init__(self, size: Size, way: int = AS_IT_IS) -> None:
        self.shape = *size, CHANNELS
        self.way = way

    def exists(self) -> bool:
        return False


def _read(file: Unread, *_: object, **__: object) -> Unread:
    return file


def _resize(
    image: Unread, dsize: Size, dst: object = None, fx: float = 0, fy: float = 0, interpolation: int = cv2.INTER_LINEAR
) -> Unread:
    known = image.way == AS_IT_IS and dst is None
    return Unread((dsize[1], dsize[0]), WAYS.get(interpolation, OTHERWISE) if known else OTHERWISE)


class _Files:
    """Stand in ``dataset.im_files`` and ``dataset.npy_files`` for files of images whose sizes ``size_of`` knows."""

    def __init__(self, size_of: Callable[[int], Size]) -> None:
        self.size_of = size_of

    def __getitem__(self, i: int) -> Unread:
        return Unread(self.size_of(i))


class _Reader:
    """Override attributes of a data set's class."""

    __slots__ = ()
    im_files = npy_files = property(lambda self: self.unread_files)


def sharing(cls: type, attributes: Names, **own: object) -> Any:
    """Return an object that shares another one's attributes, but has another class, and its ``own`` in slots of that."""
    made: Any = object.__new__(cls)
    made.__dict__ = attributes
    for name, value in own.items():
        setattr(made, name, value)
    return made


def reader(stock: type, attributes: Names, size_of: Callable[[int], Size]) -> Any:
    """Return a data set of a framework's class with these attributes, whose ``load_image`` reads nothing."""

    def unread(load: Any) -> Any:
        return with_names(load, imread=_read, cv2=recording_module(cv2, {"imread": _read, "resize": _resize}))

    own: Any = stock.load_image  # type: ignore[attr-defined]
    bases: tuple[type, ...] = (_Reader, stock)
    # A derived class may call the method of its base.
    base = next(cls for cls in reversed(stock.__mro__) if "load_image" in vars(cls))
    if (load := vars(base)["load_image"]) is not own:
        bases = (*bases, type(base.__name__, stock.__bases__, {"load_image": unread(load)}))
    made = type(stock.__name__, bases, {"load_image": unread(own), "__slots__": ("unread_files",)})
    return sharing(made, attributes, unread_files=_Files(size_of))


def sizes(stock: type, dataset: object, originals: Sequence[Size], side: int) -> tuple[list[Size], list[int]]:
    """Return (height, width) of each image as ``load_image`` gives it, and how it is resized; ``side`` x ``side`` where that wants pixels."""
    nothing: dict[str, list] = {name: [None] * len(originals) for name in ("ims", "im_hw0", "im_hw")}
    try:
        seen = reader(stock, {**vars(dataset), **nothing, "buffer": []}, originals.__getitem__)
        loaded = [seen.load_image(i) for i in range(len(originals))]
        found: list[Size] = [(int(size[0]), int(size[1])) for _, _, size in loaded]
        ways: list[int] = [image.way for image, _, _ in loaded]
    except Exception as error:
        warn(f"loader_optim: every image may be {side}x{side}: {stock.__name__}.load_image wants pixels: {error}")
        return [(side, side)] * len(originals), [OTHERWISE] * len(originals)
    return found, ways
