"""Replaces ``LoadImages`` of detect.py and its like: threads read and letterbox the next images by YOLOv5's own code."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Generator

from torch_fastdet.images.ahead import in_order
from torch_fastdet.patching.protocols import Function, Loader
from torch_fastdet.patching.replace import around

THREADS, AHEAD = 4, 8
ATTRIBUTES = "count", "files", "nf", "video_flag", "img_size", "stride", "auto", "transforms"  # used for an image
# Maps a loader to the reader of its next images and to the attributes with which that is right. Copies and pickles have no reader.
_readers: weakref.WeakKeyDictionary[Loader, tuple[Generator[object], list[object]]] = weakref.WeakKeyDictionary()


def _attributes(loader: Loader) -> list[object]:
    return [getattr(loader, name, None) for name in ATTRIBUTES]


@around
def read_ahead(_: object, stock: Function, self: Loader) -> object:
    """Start to read images before ``LoadImages.__next__`` is asked for them. Videos are read as before."""
    images = self.video_flag.index(True) if True in self.video_flag else self.nf
    reader, known = _readers.pop(self, (None, None))
    if reader is not None and known != _attributes(self):
        reader.close()  # somebody begins again, or reads otherwise
        reader = None
    if self.count >= images or (reader is None and images - self.count == 1):
        return stock(self)
    if reader is None:
        loader = copy.copy(self)  # `self` must not be held by its own reader

        def read(number: int) -> object:
            each = copy.copy(loader)
            each.count = number
            return stock(each)

        reader = in_order(read, range(self.count, images), THREADS, AHEAD)
    self.count += 1
    found = next(reader)
    if self.count < images:
        _readers[self] = reader, _attributes(self)
    else:
        reader.close()
    return found
