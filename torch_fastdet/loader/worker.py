"""``DataLoader`` whose processes make plans, and what turns plans into the batches that the loop gets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import get_worker_info

from torch_fastdet._say import say
from torch_fastdet.loader.ahead import Ahead
from torch_fastdet.loader.device import DevicePictures
from torch_fastdet.loader.memory import CHANNELS, PictureMemory
from torch_fastdet.loader.plan import Indices, Picture, Plan, finish, pack, run_on_cpu
from torch_fastdet.loader.slots import Parcel
from torch_fastdet.memory import words

#: Pixels that travel with a plan go through shared memory from this size on, and in the message itself below it.
SMALL = 1 << 16

_one_at_a_time = threading.RLock()  # the garbage collector may end another loader inside


class PlanBatches:
    """A batch sampler whose batches ask for plans; with ``repeat`` it starts again at its end, for ever."""

    def __init__(self, batches: Any, repeat: bool = False) -> None:
        self.sampler = batches  # where InfiniteDataLoader looks for its length
        self.repeat = repeat

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Indices]:
        while True:
            for batch in self.sampler:
                yield Indices(batch)
            if not self.repeat:
                return


@dataclass
class PlannedBatch:
    """What a loader process sends where the GPU makes the pictures."""

    plan: Plan
    #: Which pictures of the plan show where in each picture of the batch: (n, 1, 1), or (n, 2, 2) with ``--quad``.
    grid: np.ndarray
    rest: Any


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
        numbered = [(torch.full((1, 1, 1), number, dtype=torch.int16), *item[1:]) for number, item in enumerate(items)]
        numbers, *rest = self.stock(numbered)
        shown, places = np.unique(numbers.numpy()[:, 0], return_inverse=True)
        grid = places.reshape(len(numbers), *numbers.shape[2:])
        pictures = [items[number][0] for number in shown.tolist()]
        if not self.on_gpu:
            return (assemble(self.make(pictures, alone=grid.shape[1:] == (1, 1)), grid), *rest)
        kept = tuple(value.numpy() if isinstance(value, torch.Tensor) else value for value in rest)
        return PlannedBatch(self.plan(pictures), grid, kept)

    def plan(self, pictures: list[Picture]) -> Plan:
        """The plan that this process sends."""
        if get_worker_info() is not None:
            pictures = [picture if picture.is_shared() else finish(picture, self.memory) for picture in pictures]
        plan = pack(pictures, self.memory)
        if plan.own.nbytes > SMALL:
            plan.own = torch.as_tensor(plan.own)
        return plan

    def make(self, pictures: list[Picture], alone: bool = True) -> Any:
        """The pictures themselves, uint8 (n, 3, height, width); with ``alone`` in a loader process, for the loop's process."""
        shape = (len(pictures), CHANNELS, pictures[0].height, pictures[0].width)
        parcel = Parcel(shape) if alone and get_worker_info() is not None else None
        out = torch.empty(shape, dtype=torch.uint8) if parcel is None else parcel.tensor
        run_on_cpu(pack(pictures, self.memory), self.memory, out)
        return out if parcel is None else parcel


class CollateDicts(Collate):
    """The same for items and batches that are dictionaries, whose pictures have the name ``img``."""

    def __call__(self, items: Sequence[Any]) -> Any:
        if isinstance(items[0]["img"], torch.Tensor):  # stock has made them
            return self.stock(list(items))
        number = torch.zeros((1, 1, 1), dtype=torch.uint8)
        pictures = [item["img"] for item in items]
        batch = self.stock([{**item, "img": number} for item in items])
        if not self.on_gpu:
            batch["img"] = self.make(pictures)
            return batch
        batch["img"] = None  # keeps its place
        grid = np.arange(len(pictures)).reshape(-1, 1, 1)
        # In the message itself: each tensor would take a file of shared memory.
        small = {
            name: value.numpy()
            for name, value in batch.items()
            if isinstance(value, torch.Tensor) and value.nbytes <= SMALL
        }
        return PlannedBatch(self.plan(pictures), grid, ({**batch, **small}, list(small)))


def assemble(pictures: Any, grid: np.ndarray) -> Any:
    """The pictures of the batch, each of one picture of the plan, of one at twice its size, or of four."""
    if grid.shape[1:] == (1, 1):
        return pictures
    out = []
    for (top_left, top_right), (bottom_left, bottom_right) in grid.tolist():
        if top_left == bottom_right:
            one = pictures[top_left][None].float()
            out.append(F.interpolate(one, scale_factor=2.0, mode="bilinear", align_corners=False)[0].to(torch.uint8))
        else:
            rows = ((top_left, top_right), (bottom_left, bottom_right))
            out.append(torch.cat([torch.cat([pictures[i] for i in row], 2) for row in rows], 1))
    return torch.stack(out)


class Finisher:
    """Makes the batches on the GPU."""

    def __init__(self, memory: PictureMemory, device: torch.device) -> None:
        self.device = device
        self.pictures = DevicePictures(memory, device)

    def __call__(self, batch: Any) -> Any:
        images = assemble(self.pictures(batch.plan), batch.grid)
        rest = [
            torch.from_numpy(value).pin_memory().to(self.device, non_blocking=True)
            if isinstance(value, np.ndarray)
            else value
            for value in batch.rest
        ]
        return (images, *rest)


class FinisherOfDicts(Finisher):
    """The same for batches that are dictionaries: pictures on the GPU, other tensors in pinned memory, as stock's loader pins."""

    def __call__(self, batch: Any) -> dict:
        if isinstance(batch, PlannedBatch):
            out, small = batch.rest
            out["img"] = self.pictures(batch.plan)
            out.update((name, torch.from_numpy(out[name])) for name in small)
        else:
            out = batch  # stock has made it
        for name, value in out.items():
            if isinstance(value, torch.Tensor) and not value.is_cuda:
                out[name] = value.pin_memory()
        return out


class PlannedLoading:
    """What a ``DataLoader`` of a host needs beside its own: a memory, and a finisher where there is a GPU."""

    #: Makes the batches of this host on the GPU.
    finishing: type[Finisher] = Finisher

    def __init__(self, memory: PictureMemory, workers: int, on_gpu: bool, device: torch.device | None = None) -> None:
        self.memory = memory
        self.workers = workers
        self.on_gpu = on_gpu
        self._device = device
        self._finisher: Finisher | None = None
        if not on_gpu:
            self._say("made on the CPU")

    @property
    def finisher(self) -> Finisher:
        with _one_at_a_time:  # two threads may begin a loop each
            if self._finisher is None:
                self._finisher = self.finishing(self.memory, self._device or current_gpu())
                kept = self._finisher.pictures.held()
                self._say(f"made on the GPU, which keeps {words(kept)} of them")
            return self._finisher

    def batches(self, source: Iterator[Any], limited: bool = False) -> Iterator[Any]:
        """The finished batches of a ``DataLoader``'s iterator. Loader processes work ahead, and then this does as well.

        With ``limited`` no further ahead than the :class:`Ahead` that is returned is allowed to.
        """
        if not self.on_gpu:
            return source
        if not self.workers:
            return map(self.finisher, source)
        return Ahead(source, self.finisher, self.finisher.device, limited)

    def _say(self, how: str) -> None:
        memory = self.memory
        count = "all" if memory.places == len(memory) else f"{memory.places:,} of"
        say(
            f"loader_optim: {count} {len(memory):,} pictures are decoded once, into {words(memory.nbytes)} that all "
            f"processes share; batches are {how}"
        )


class PlannedLoadingOfDicts(PlannedLoading):
    finishing = FinisherOfDicts


def current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
