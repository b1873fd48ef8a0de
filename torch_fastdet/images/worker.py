"""Runs in loader processes: puts the plans of a batch together, and makes its images if there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.data import get_worker_info

from torch_fastdet._say import warn
from torch_fastdet.images.image_memory import CHANNELS, ImageMemory
from torch_fastdet.images.on_cpu import finish, run_on_cpu
from torch_fastdet.images.parcel import Parcel
from torch_fastdet.images.plan import Bytes, ImagePlan, Plan, pack

#: Pixels and files of a plan go through shared memory if they have more bytes than this, else in the message itself.
SMALL = 1 << 16
#: An item or a batch of a framework.
Sent: TypeAlias = "dict | tuple"


def _for_another_process(own: Bytes) -> object:
    parcel = _parcel((own.size,)) if own.size > SMALL else None
    if parcel is None:
        return own.joined()
    own.joined(parcel.tensor.numpy())
    return parcel


def _parcel(shape: tuple[int, ...]) -> Parcel | None:
    """Return a parcel; None if the system refuses it, as a process's limits may: then the pixels go through the pipe of the process."""
    try:
        return Parcel(shape)
    except OSError as error:
        warn(f"loader_optim: batches of a loader process are copied through a pipe: {error}")
        return None


@dataclass
class PlannedBatch:
    """Hold what a loader process sends where the GPU makes the images."""

    plan: Plan
    #: The batch without its images. Small tensors become arrays.
    rest: Sent


def images_of(batch: Sent) -> Any:
    """Return the images of an item or a batch: ``img`` of a dictionary, and what comes first in a tuple."""
    return batch["img"] if isinstance(batch, dict) else batch[0]


def with_images(batch: Sent, images: object) -> Sent:
    """Return an item or a batch with other images."""
    return {**batch, "img": images} if isinstance(batch, dict) else (images, *batch[1:])


def with_each(change: Callable[[Any], object], batch: Sent) -> Sent:
    """Return a tuple or dictionary whose values went through ``change``."""
    if isinstance(batch, dict):
        return {name: change(value) for name, value in batch.items()}
    return tuple(change(value) for value in batch)


def _in_message(value: object) -> object:
    """Return a small tensor as an array, which is sent in the message itself: each tensor would take a file of shared memory."""
    return value.numpy() if isinstance(value, torch.Tensor) and value.nbytes <= SMALL else value


class Collate:
    """Put the plans of a batch together. Everything but pixels goes through the framework's own ``collate_fn``, ``stock``.

    Items hold plans, not pixels; for these ``stock`` gets images of one pixel. With ``on_gpu`` the result is for
    :class:`~torch_fastdet.images.finish.Finisher`.
    """

    def __init__(self, stock: Callable[[list], Sent], memory: ImageMemory, on_gpu: bool) -> None:
        self.stock = stock
        self.memory = memory
        self.on_gpu = on_gpu

    def __call__(self, items: Sequence[Any]) -> Sent | PlannedBatch:
        if isinstance(images_of(items[0]), torch.Tensor):  # the framework has made the images
            self.memory.take_sent()
            return self.stock(list(items))
        images, pixel = [images_of(item) for item in items], torch.empty((1, 1, 1), dtype=torch.uint8)
        batch = self.stock([with_images(item, pixel) for item in items])
        if self.on_gpu:
            return PlannedBatch(self.plan(images), with_each(_in_message, with_images(batch, None)))
        return with_images(batch, self.make(images))

    def plan(self, images: list[ImagePlan]) -> Plan:
        """Return the plan that this process sends."""
        in_worker = get_worker_info() is not None
        if in_worker:
            images = [image if image.is_shared() else finish(image, self.memory) for image in images]
        plan = pack(images, self.memory, on_cpu=False, join=_for_another_process if in_worker else Bytes.joined)
        self.memory.take_sent()
        return plan

    def make(self, images: list[ImagePlan]) -> torch.Tensor | Parcel:
        """Return the images themselves, uint8 (n, 3, height, width); in a loader process, for the loop's process."""
        shape = (len(images), CHANNELS, images[0].height, images[0].width)
        parcel = _parcel(shape) if get_worker_info() is not None else None
        out = torch.empty(shape, dtype=torch.uint8) if parcel is None else parcel.tensor
        run_on_cpu(pack(images, self.memory), self.memory, out)
        self.memory.take_sent()
        return out if parcel is None else parcel
