"""Pictures in memory to a network's input by one operator, for the switch ``letterbox_optim`` of both hosts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_fastdet import ops
from torch_fastdet.ops.letterbox import Placing

MOST_STORAGES = 8
LARGEST_SIDE = 1 << 24


def fits(pictures: object) -> bool:
    """Whether the operator takes these pictures: a list of uint8 arrays HWC, all of three channels or all grey."""
    if not isinstance(pictures, list) or not pictures:
        return False
    if any(type(im) is not np.ndarray or im.dtype != np.uint8 or im.ndim != 3 for im in pictures):
        return False
    channels = {im.shape[2] for im in pictures}
    return channels in ({1}, {3}) and all(0 < side <= LARGEST_SIDE for im in pictures for side in im.shape[:2])


def letterbox(
    pictures: list[np.ndarray], placings: list[Placing], device: torch.device, dtype: torch.dtype, bgr: bool = False
) -> Tensor:
    """Pictures to (images, channels, height, width) in 0..1 on ``device``. Three channels are exchanged, unless ``bgr``.

    On CUDA they are copied into one pinned buffer and uploaded together. On the CPU contiguous pictures are read where they are.
    """
    shapes = [im.shape for im in pictures]
    size, channels = list(placings[0].size), shapes[0][2]
    head = 80 * len(pictures) if device.type == "cuda" else 0  # the plan travels with the pictures
    in_place = device.type == "cpu" and len(pictures) <= MOST_STORAGES
    if in_place and all(im.flags.c_contiguous and im.flags.writeable for im in pictures):
        storages = [torch.from_numpy(im.reshape(-1)) for im in pictures]
        where = [(i, 0) for i in range(len(pictures))]  # of each picture: storage and offset
    else:
        ends = np.cumsum([head] + [im.size for im in pictures]).tolist()
        buffer = torch.empty(ends[-1], dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        for im, begin, end in zip(pictures, ends, ends[1:]):
            np.copyto(buffer[begin:end].numpy().reshape(im.shape), im)
        storages, where = [buffer], [(0, begin) for begin in ends[:-1]]
    plan = torch.tensor(
        [
            [*at, shape[0], shape[1], shape[1] * channels, p.height, p.width, p.top, p.left, 0]
            for at, shape, p in zip(where, shapes, placings)
        ],
        device="cpu",
    )
    if head:
        storages[0][:head].view(torch.int64).copy_(plan.view(-1))
        storages = [storages[0].to(device, non_blocking=True)]
        plan = storages[0][:head].view(torch.int64).view(len(pictures), 10)
    return ops.image_letterbox(storages, plan, size, channels=channels, dtype=dtype, bgr=bgr)
