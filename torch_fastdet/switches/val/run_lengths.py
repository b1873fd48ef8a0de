"""Encodes masks as COCO does, by run lengths in text: those of several images at once, with one copy to the host."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

#: So many pixels of images are copied together, as one byte each.
_MOST_PIXELS = 1 << 28


def encode(images: Iterable[Tensor]) -> list[list[dict[str, object]]]:
    """Return what ``pycocotools.mask.encode`` gives, in text, for the masks of each image: (n, height, width), of 0 and 1."""
    found: list[list[dict[str, object]]] = []
    waiting: list[Tensor] = []
    for masks in images:
        if sum(each.numel() for each in (masks, *waiting)) > _MOST_PIXELS:
            found += _encoded(waiting)
            waiting.clear()
        waiting.append(_changes(masks))
    return found + _encoded(waiting)


def _changes(masks: Tensor) -> Tensor:
    """Return (n, width, height): where a pixel differs from the one before, by columns. Before the first one is background."""
    columns = masks.transpose(1, 2)
    pixels = columns.flatten(1)
    return (F.pad(pixels, (1, -1)) != pixels).view(columns.shape)


def _encoded(images: list[Tensor]) -> list[list[dict[str, object]]]:
    if not images:
        return []
    changes = torch.cat([each.flatten() for each in images]).nonzero().flatten().cpu().numpy()
    shapes = [each.shape for each in images]
    pixels = np.repeat([width * height for _, width, height in shapes], [n for n, _, _ in shapes])
    texts = iter(_texts(changes, pixels))
    return [[{"size": [height, width], "counts": next(texts)} for _ in range(n)] for n, width, height in shapes]


def _texts(changes: np.ndarray, pixels: np.ndarray) -> list[str]:
    """Return the text of each mask.

    From a mask's fourth run on, the difference from the run before the last is written: in digits of five bits, the lowest first, as
    many as its sign needs. All but the last digit of a number have another bit, and 48 makes them printable.

    Args:
        changes: where a run begins, among the pixels of all masks.
        pixels: of each mask.
    """
    ends = pixels.cumsum()
    before = changes.searchsorted(ends)
    last = before + np.arange(len(ends))  # each mask's last run
    runs = np.diff(np.insert(changes, before, ends), prepend=0)
    counts = np.diff(last, prepend=-1)
    late = np.flatnonzero(np.arange(len(runs)) - np.repeat(last + 1 - counts, counts) > 2)
    numbers = runs.copy()
    numbers[late] -= runs[late - 2]
    digits = np.ones_like(numbers)
    for bits in range(0, 35, 5):
        digits += (numbers >= 16 << bits) | (numbers < -16 << bits)
    stops = digits.cumsum()
    place = np.arange(stops[-1]) - np.repeat(stops - digits, digits)
    more = place + 1 < np.repeat(digits, digits)
    text = ((np.repeat(numbers, digits) >> 5 * place & 31) + 32 * more + 48).astype(np.uint8).tobytes().decode()
    return [text[start:stop] for start, stop in pairwise([0, *stops[last]])]
