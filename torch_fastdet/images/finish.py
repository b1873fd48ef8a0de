"""Finishes batches in a thread: uploads what the GPU does not have yet, and makes the batch in one launch.

The GPU keeps the first images of a data set, decoded, as many as its budget allows. Unless the budget is set, it is what the first
steps leave free.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from torch_fastdet import ops
from torch_fastdet._say import say, warn
from torch_fastdet.images.image_memory import ImageMemory, hand_out
from torch_fastdet.images.jpeg_files import Wanted, one_after_another
from torch_fastdet.images.plan import FILES, OWN, SHARED, Plan, shown_of
from torch_fastdet.images.worker import PlannedBatch, Sent, with_each, with_images
from torch_fastdet.memory import GPU_BUDGET, Owner, gpu_budget, register, waits_for_steps, with_room, words

#: So many batches run before images are kept, because the first steps and their graphs must get their memory first.
FIRST_BATCHES = 16


class Finisher:
    """Make the images of batches on the GPU. All other tensors of YOLOv5's tuples go there too, those of dictionaries to pinned memory."""

    def __init__(self, memory: ImageMemory, device: torch.device) -> None:
        self.device = device
        self.images = DeviceImages(memory, device)

    def __call__(self, batch: Sent | PlannedBatch) -> Sent:
        if isinstance(batch, PlannedBatch):  # else the framework has made it
            batch = with_images(batch.rest, self.images(batch.plan))
        return with_each(lambda value: self._moved(value, uploads=not isinstance(batch, dict)), batch)

    def _moved(self, value: object, uploads: bool) -> object:
        value = torch.as_tensor(value) if isinstance(value, np.ndarray) else value
        if not isinstance(value, torch.Tensor) or value.is_cuda:
            return value
        pinned = value.pin_memory()
        return pinned.to(self.device, non_blocking=True) if uploads else pinned


class Turns:
    """Let threads change GPU memory one after another, each on its own stream and behind the work of the one before.

    Behind the event ``done`` the memory is free to use.
    """

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def turn(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Let what a thread queues on ``stream`` inside run before what the next thread queues inside."""
        with self._lock:
            stream.wait_event(self._done)
            try:
                yield
            finally:  # a turn that failed has queued something, too
                self._done.record(stream)


class DeviceImages(Owner):
    """Hold the images of one data set on one GPU, and the batches made of them. Several threads may ask for batches."""

    what, budget = "images on the GPU", GPU_BUDGET

    def __init__(self, memory: ImageMemory, device: torch.device) -> None:
        self.memory = memory
        self.device: torch.device = device
        self._cache = self._allocate(0)
        self._offsets = np.full(len(memory), -1, dtype=np.int64)
        self._fits, self._here = np.zeros((2, len(memory)), dtype=bool)
        self._waits = FIRST_BATCHES if waits_for_steps() else 0
        if not self._waits:
            self._keep()
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))  # the cache's memory is free behind it
        self._turns = Turns(ready)
        self._host = [memory.tensor()] if memory.jpegs is None else [memory.tensor(), memory.jpegs.tensor()]
        register(self)

    def _count(self) -> None:
        self._waits -= 1
        if not self._waits:
            self._keep()
            say(f"loader_optim: the GPU keeps {self.how_many()}")

    def _keep(self) -> None:
        memory = self.memory
        comes = memory.offsets >= 0  # others travel as pixels, for each batch
        if memory.jpegs is not None:
            comes |= memory.jpegs.may_keep
        self._offsets, size = hand_out(memory.shapes * comes[:, None], gpu_budget(self.device))
        self._cache = self._allocate(size)
        self._fits = (self._offsets >= 0) & (self.held() == size)

    def held(self) -> int:
        return self._cache.numel()

    def how_many(self) -> str:
        if self._waits:
            return "decoded images as far as the first steps leave memory free"
        return f"{words(self.held())} of decoded images"

    def offer(self) -> str:
        return f"{words(self.held())} of images" if self.held() else ""

    def release(self) -> None:
        """Keep no images from now on: they are uploaded for each batch."""
        with self._turns.turn(torch.cuda.current_stream(self.device)):
            self._fits[:] = self._here[:] = False
            self._waits = 0
            self._cache = self._allocate(0)

    def __call__(self, plan: Plan) -> torch.Tensor:
        """Return the images of a plan, uint8 (n, 3, height, width), made on the current stream."""
        return with_room(
            lambda: self._make(plan), self.device, lambda line: say(f"loader_optim: {line}", every_rank=True)
        )

    def _make(self, plan: Plan) -> torch.Tensor:
        stream = torch.cuda.current_stream(self.device)
        with self._turns.turn(stream):  # what is noted as here is only there behind the turn that brought it
            if self._waits:
                self._count()
            cache = self._cache  # which another thread may let go
            cache.record_stream(stream)  # the allocator keeps it until this batch is made
            storages, brought = self._bring(plan)
        warp, lanes = ops.opencv_rules()
        tables = self._tables(plan, brought)
        return ops.image_augment(storages, **tables, size=list(plan.size), warp=warp, hsv_lanes=lanes)

    def _allocate(self, size: int) -> torch.Tensor:
        try:
            with torch.inference_mode(False):  # validation makes it, and a thread outside of inference mode fills it
                return torch.empty(size, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError:
            warn(f"loader_optim: the GPU has no {words(size)} left for images, so they are uploaded for each batch")
            return torch.empty(0, dtype=torch.uint8, device=self.device)

    def _bring(self, plan: Plan) -> tuple[list[torch.Tensor], np.ndarray]:
        """Upload what the cache does not hold, and decode files. Returns the batch's storages, and its placements in them."""
        memory, own = self.memory, torch.as_tensor(plan.own)
        indices = np.unique(plan.sources[plan.sources >= 0])
        missing = indices[~self._here[indices]]
        keep, decoded, sizes = self._fits[missing], memory.decoded(missing), memory.sizes(missing)
        come = plan.files[np.isin(plan.files[:, 0], missing)]  # with the plan
        sent = np.searchsorted(missing, come[:, 0])
        decoded[sent] = False  # another process may have decoded one since
        storage, begins, taken, hosts = 2 - decoded, memory.offsets[missing], sizes.copy(), list(self._host)
        if not decoded.all():
            taken[~decoded], begins[~decoded] = memory.files.rows(missing[~decoded]).T
        if len(come):
            taken[sent], begins[sent], storage[sent] = come[:, 1], come[:, 2], len(hosts) + 1
            hosts.append(torch.as_tensor(plan.sent))
        places = one_after_another(taken, own.numel())
        staged = torch.empty(int(places[-1]), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        pieces = np.stack((storage, begins, taken, places[:-1]), 1)
        ops.image_gather_(staged, [own, *hosts], torch.from_numpy(np.insert(pieces, 0, (0, 0, own.numel(), 0), 0)))
        upload, places = staged.to(self.device, non_blocking=True), places[:-1]
        for index in np.flatnonzero(keep & decoded).tolist():
            begin, size, place = int(self._offsets[missing[index]]), int(sizes[index]), int(places[index])
            self._cache[begin : begin + size].copy_(upload[place : place + size])
        placements = plan.placements.copy()
        storages, place_of, storage_of = [self._cache, upload], places.copy(), np.full(len(missing), OWN)
        if not decoded.all():
            part, whole = ~decoded & ~keep, ~decoded & keep
            ends = one_after_another(np.where(part, sizes, 0))
            storages.append(torch.empty(int(ends[-1]), dtype=torch.uint8, device=self.device))
            kept, everything = memory.shapes_of(missing), np.zeros((len(missing), 4), dtype=np.int64)
            everything[:, [3, 2]] = kept
            files = memory.files.files
            for out, which, to, seen in (
                (storages[FILES], part, ends[:-1], shown_of(plan, missing)),
                (self._cache, whole, self._offsets[missing], everything),
            ):
                Wanted(places, to, files.sizes[missing], kept, files.ways[missing], seen)[which].decode(
                    out, upload, staged
                )
            place_of[part], storage_of[part] = ends[:-1][part], FILES
        self._here[missing[keep]] = True
        row = np.searchsorted(missing, plan.sources)
        row[row == len(missing)] = 0
        passes = np.isin(plan.sources, missing[~keep])
        stays = ~passes & (plan.sources >= 0)
        placements[passes, 0], placements[passes, 1] = storage_of[row[passes]], place_of[row[passes]]
        placements[stays, 0], placements[stays, 1] = SHARED, self._offsets[plan.sources[stays]]
        return storages, placements

    def _tables(self, plan: Plan, placements: np.ndarray) -> dict[str, Any]:
        arrays = plan.tables_with(placements)
        starts = one_after_another(np.array([array.nbytes for array in arrays.values()])).tolist()
        packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        view = packed.numpy()
        for array, start in zip(arrays.values(), starts, strict=False):
            view[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        there = packed.to(self.device, non_blocking=True)
        tables = {}
        for (name, array), start in zip(arrays.items(), starts, strict=False):
            piece = there[start : start + array.nbytes]
            tables[name] = piece.view(torch.from_numpy(array).dtype).view(array.shape)
        return tables
