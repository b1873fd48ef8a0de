"""Replaces ``LoadImages`` of detect.py and its like: threads read and letterbox the next images by YOLOv5's own code."""

from __future__ import annotations

import copy

from torch_fastdet.images.ahead import in_order
from torch_fastdet.patching.protocols import Function, Loader
from torch_fastdet.patching.replace import around

KEY = "torch_fastdet_reader"  # in a loader's attributes while images are read ahead
THREADS, AHEAD = 4, 8


@around
def read_ahead(_: object, stock: Function, self: Loader) -> object:
    """Start to read images before ``LoadImages.__next__`` is asked for them. Videos are read as before."""
    images = self.video_flag.index(True) if True in self.video_flag else self.nf
    at, reader = self.__dict__.pop(KEY, (None, None))
    if at != self.count and reader is not None:
        reader.close()  # somebody begins again
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
        self.__dict__[KEY] = self.count, reader
    else:
        reader.close()
    return found
