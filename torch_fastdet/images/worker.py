"""What loader processes run: they put the plans of a batch together, and make its pictures where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import get_worker_info

from torch_fastdet.images.memory import CHANNELS, PictureMemory
from torch_fastdet.images.on_cpu import finish, run_on_cpu
from torch_fastdet.images.plan import Bytes, Picture, Plan, pack
from torch_fastdet.images.slots import Parcel

#: What travels with a plan goes through shared memory from this size on, and in the message itself below it.
SMALL = 1 << 16


def _for_another_process(own: Bytes) -> object:
    if own.size <= SMALL:
        return own.joined()
    parcel = Parcel((own.size,))
    own.joined(parcel.tensor.numpy())
    return parcel


@dataclass
class PlannedBatch:
    """What a loader process sends where the GPU makes the pictures."""

    plan: Plan
    #: Which pictures of the plan show where in each picture of the batch: (n, 1, 1), or (n, 2, 2) with ``--quad``.
    grid: np.ndarray
    rest: Any


def _is_small(value: object) -> bool:
    """Whether this is a tensor to send in the message itself: each tensor would take a file of shared memory."""
    return isinstance(value, torch.Tensor) and value.nbytes <= SMALL


class Collate:
    """Puts the plans of a batch together; everything but pixels goes through the host's own ``collate_fn``.

    Items are what the host's data set returns, with a :class:`Picture` in place of the pixels. The host's function gets
    pictures of one pixel that hold their number, so that its result tells which picture went where.
    """

    def __init__(self, stock: Callable[[list], Any], memory: PictureMemory, on_gpu: bool) -> None:
        self.stock = stock
        self.memory = memory
        self.on_gpu = on_gpu

    def __call__(self, items: Sequence[Any]) -> Any:
        if isinstance(items[0][0], torch.Tensor):  # stock has made them
            self.memory.forget_sent()
            return self.stock(list(items))
        numbered = [(torch.full((1, 1, 1), number, dtype=torch.int16), *item[1:]) for number, item in enumerate(items)]
        numbers, *rest = self.stock(numbered)
        shown, places = np.unique(numbers.numpy()[:, 0], return_inverse=True)
        grid = places.reshape(len(numbers), *numbers.shape[2:])
        pictures = [items[number][0] for number in shown.tolist()]
        if not self.on_gpu:
            return (assemble(self.make(pictures, alone=grid.shape[1:] == (1, 1)), grid), *rest)
        return PlannedBatch(
            self.plan(pictures), grid, tuple(value.numpy() if _is_small(value) else value for value in rest)
        )

    def plan(self, pictures: list[Picture]) -> Plan:
        """The plan that this process sends."""
        in_worker = get_worker_info() is not None
        if in_worker:
            pictures = [picture if picture.is_shared() else finish(picture, self.memory) for picture in pictures]
        plan = pack(pictures, self.memory, on_cpu=False, join=_for_another_process if in_worker else Bytes.joined)
        self.memory.forget_sent()
        return plan

    def make(self, pictures: list[Picture], alone: bool = True) -> Any:
        """The pictures themselves, uint8 (n, 3, height, width); with ``alone`` in a loader process, for the loop's process."""
        shape = (len(pictures), CHANNELS, pictures[0].height, pictures[0].width)
        parcel = Parcel(shape) if alone and get_worker_info() is not None else None
        out = torch.empty(shape, dtype=torch.uint8) if parcel is None else parcel.tensor
        run_on_cpu(pack(pictures, self.memory), self.memory, out)
        self.memory.forget_sent()
        return out if parcel is None else parcel


class CollateDicts(Collate):
    """The same for items and batches that are dictionaries, whose pictures have the name ``img``."""

    def __call__(self, items: Sequence[Any]) -> Any:
        if isinstance(items[0]["img"], torch.Tensor):  # stock has made them
            self.memory.forget_sent()
            return self.stock(list(items))
        number = torch.zeros((1, 1, 1), dtype=torch.uint8)
        pictures = [item["img"] for item in items]
        batch = self.stock([{**item, "img": number} for item in items])
        if not self.on_gpu:
            batch["img"] = self.make(pictures)
            return batch
        batch["img"] = None  # keeps its place
        grid = np.arange(len(pictures)).reshape(-1, 1, 1)
        small = {name: value.numpy() for name, value in batch.items() if _is_small(value)}
        return PlannedBatch(self.plan(pictures), grid, ({**batch, **small}, list(small)))


def assemble(pictures: Any, grid: np.ndarray) -> Any:
    """The pictures of the batch: each place of the grid shows a picture of the plan, and one alone is enlarged to fill all places."""
    count, rows, columns = grid.shape
    if rows == columns == 1:
        return pictures
    channels, height, width = pictures.shape[1:]
    tiles = torch.stack([pictures[number] for number in grid.ravel().tolist()])
    tiles = tiles.view(count, rows, columns, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    out = tiles.reshape(count, channels, rows * height, columns * width)
    for place in np.flatnonzero((grid == grid[:, :1, :1]).all((1, 2))).tolist():
        alone = pictures[grid[place, 0, 0]][None].float()
        out[place] = F.interpolate(alone, scale_factor=2.0, mode="bilinear")[0].to(torch.uint8)
    return out
