"""Turns images in memory into a network's input by one operator, for the switch ``predict_optim`` of both frameworks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_fastdet import ops
from torch_fastdet._say import count
from torch_fastdet.ops.letterbox import Placing
from torch_fastdet.ops.letterbox import letterbox as place_of

MOST_STORAGES = 8
UPLOAD = 64 << 20  # bytes of images that are copied to a GPU at once, or one image
LARGEST_SIDE = 1 << 24


def fits(images: object) -> bool:
    """Return whether the operator takes these images: a list of uint8 arrays HWC, all of three channels or all grey."""
    if not isinstance(images, list) or not images:
        return False
    if any(type(im) is not np.ndarray or im.dtype != np.uint8 or im.ndim != 3 for im in images):
        return False
    channels = {im.shape[2] for im in images}
    return channels in ({1}, {3}) and all(0 < side <= LARGEST_SIDE for im in images for side in im.shape[:2])


def letterbox(
    images: list[np.ndarray], placings: list[Placing], device: torch.device, dtype: torch.dtype, bgr: bool = False
) -> Tensor:
    """Return images as (images, channels, height, width) in 0..1 on ``device``. Three channels are exchanged, unless ``bgr``.

    A long list needs no more memory than a few of its images, beside the result: the CPU reads them where they are, and a GPU gets
    them in groups of ``UPLOAD`` bytes.
    """
    count("predict_optim", "images", len(images))
    out = torch.empty((len(images), images[0].shape[2], *placings[0].size), dtype=dtype, device=device)
    cuda, end = device.type == "cuda", 0
    while end < len(images):
        begin, size = end, 0
        while end < len(images) and (size + images[end].size <= UPLOAD if cuda else end < begin + MOST_STORAGES):
            size += images[end].size
            end += 1
        end = max(end, begin + 1)
        group = images[begin:end]
        if cuda:
            if begin:
                torch.cuda.current_stream(device).synchronize()  # so that one buffer is pinned
            buffer, ends = one_after_another(group, pin_memory=True)
            storages, where = [buffer.to(device, non_blocking=True)], [(0, first) for first in ends[:-1]]
        else:
            storages = [_bytes_of(image) for image in group]
            where = [(i, 0) for i in range(len(group))]
        plan = _plan(group, placings[begin:end], where).to(device, non_blocking=True)
        ops.image_letterbox_(out[begin:end], storages, plan, bgr)
        storages.clear()  # before the next ones are made
    return out


def _bytes_of(image: np.ndarray) -> Tensor:
    in_place = image.flags.c_contiguous and image.flags.writeable
    return torch.from_numpy((image if in_place else image.copy()).reshape(-1))


class Layout:
    """Say where the letterbox puts the images of a batch, in numbers that batches of the same shapes share."""

    def __init__(self, images: list[Any], placings: list[Placing]) -> None:
        self.shape = len(images), images[0].shape[2], *placings[0].size
        plan = _plan(images, placings, [(0, 0)] * len(images)).numpy()
        rows = [place_of(list(placings[0].size), list(image.shape[:2]), None, "ultralytics") for image in images]
        self._numbers = np.concatenate((plan.reshape(-1), np.array(rows, dtype=np.float32).reshape(-1).view(np.int64)))
        self._last: tuple[Any, Any, Any] = (None, None, None)

    def letterbox(
        self,
        storages: list[Tensor],
        where: list[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype,
        stream: torch.cuda.Stream | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the network's input, and rows of :func:`torch_fastdet.ops.letterbox`, both on ``device``, where the images are, too.

        ``where`` says of each image in which storage, and at which offset. ``stream`` is the current one of a GPU.
        """
        count("predict_optim", "images", len(where))
        of_plan, plan, rows = self._last
        if of_plan != (where, device, stream):  # numbers that are there already are uploaded in the order of the stream
            numbers, end = self._numbers.copy(), 10 * len(where)
            numbers[:end].reshape(-1, 10)[:, :2] = where
            there = torch.from_numpy(numbers).to(device, non_blocking=True)
            plan, rows = there[:end].view(-1, 10), there[end:].view(torch.float32).view(-1, 6)
            self._last = (where, device, stream), plan, rows
        out = torch.empty(self.shape, dtype=dtype, device=device)
        ops.image_letterbox_(out, storages, plan)
        return out, rows


def _plan(images: list[Any], placings: list[Placing], where: list[tuple[int, int]]) -> Tensor:
    rows = [
        [*at, *im.shape[:2], im.shape[1] * im.shape[2], p.height, p.width, p.top, p.left, 0]
        for at, im, p in zip(where, images, placings)
    ]
    return torch.tensor(rows, device="cpu")


def one_after_another(images: list[np.ndarray], pin_memory: bool) -> tuple[Tensor, list[int]]:
    """Return bytes that hold these images, and where each image begins, and the last one ends.

    NumPy copies, in this thread: PyTorch's threads would spin after a copy, beside threads that have work.
    """
    ends = list(itertools.accumulate((im.size for im in images), initial=0))
    buffer = torch.empty(ends[-1], dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
    whole = buffer.numpy()
    for image, first, last in zip(images, ends, ends[1:]):
        np.copyto(whole[first:last].reshape(image.shape), image)
    return buffer, ends
