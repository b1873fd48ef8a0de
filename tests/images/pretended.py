"""Provide what makes batches on a GPU, with the CPU as the GPU."""

import contextlib
from types import SimpleNamespace

import numpy as np
import torch

from torch_fastdet import ops
from torch_fastdet.images import finish
from torch_fastdet.images.image_memory import hand_out


def images_on_the_cpu(memory, cached=0):
    """Return a DeviceImages whose GPU is the CPU; its cache has places for the first ``cached`` bytes of the memory."""
    images = object.__new__(finish.DeviceImages)
    images.memory, images.device = memory, torch.device("cpu")
    images._cache = torch.zeros(cached, dtype=torch.uint8)
    images._offsets, _ = hand_out(memory.shapes, cached)
    images._fits = images._offsets >= 0
    images._waits = 0
    images._here = np.zeros(len(memory), dtype=bool)
    images._host = [memory.tensor()] if memory.jpegs is None else [memory.tensor(), memory.jpegs.tensor()]
    return images


def made(plan, storages, placements):
    """Return the images of a plan from the storages that were uploaded for it."""
    tables = {name: torch.from_numpy(table) for name, table in plan.tables_with(placements).items()}
    warp, lanes = ops.opencv_rules()
    return ops.image_augment(storages, **tables, size=list(plan.size), warp=warp, hsv_lanes=lanes)


def cuda():
    """Provide what a loader's thread needs of torch, without a GPU."""
    event = SimpleNamespace(record=lambda stream: None)
    cuda = SimpleNamespace(
        set_device=lambda device: None,
        Stream=lambda device: object(),
        stream=lambda stream: contextlib.nullcontext(),
        Event=lambda: event,
        current_stream=lambda device: SimpleNamespace(wait_event=lambda event: None),
    )
    return SimpleNamespace(cuda=cuda, Tensor=torch.Tensor)
