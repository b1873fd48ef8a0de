"""Makes the images of a plan on the CPU."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from torch_fastdet import ops
from torch_fastdet.images.jpeg import Wanted, one_after_another
from torch_fastdet.images.memory import CHANNELS, ImageMemory
from torch_fastdet.images.plan import FILES, KEEP_BGR, ImagePlan, Plan, in_pixels, pack, shown_of, whole

#: ``pixels``: memory that a thread uses for each batch again. Fresh pages cost a tenth of an image's time.
_room = threading.local()


def run_on_cpu(plan: Plan, memory: ImageMemory, out: torch.Tensor) -> None:
    """Make the images of a plan in ``out``, uint8 (n, 3, height, width). Of files, what is shown is decoded."""
    own = plan.own if isinstance(plan.own, torch.Tensor) else torch.from_numpy(plan.own)
    storages, places = [memory.tensor(), own], plan.placements
    if len(plan.files):
        pixels, places = _decoded(plan, memory)
        storages.append(pixels)
    warp, lanes = ops.opencv_rules()
    tables: dict[str, Any] = {name: torch.from_numpy(table) for name, table in plan.tables_with(places).items()}
    ops.image_augment_(out, storages, **tables, warp=warp, hsv_lanes=lanes)


def _decoded(plan: Plan, memory: ImageMemory) -> tuple[torch.Tensor, np.ndarray]:
    """Return what the plan shows of its files, until the next call, and its placements with that."""
    order = plan.files[:, 0].argsort()
    indices, _, begins = plan.files[order].T
    kept, files = memory.shapes[indices], memory.files.files
    sent, ends = torch.as_tensor(plan.sent), one_after_another(kept.prod(1) * CHANNELS)
    if getattr(_room, "pixels", np.empty(0)).size < ends[-1]:
        _room.pixels = np.empty(ends[-1], dtype=np.uint8)
    pixels = torch.from_numpy(_room.pixels[: ends[-1]])
    seen = shown_of(plan, indices)
    Wanted(begins, ends[:-1], files.sizes[indices], kept, files.ways[indices], seen).decode(pixels, sent, sent)
    placements, of_files = plan.placements.copy(), np.isin(plan.sources, indices)
    placements[of_files, 0] = FILES
    placements[of_files, 1] = ends[np.searchsorted(indices, plan.sources[of_files])]
    return pixels, placements


def finish(image: ImagePlan, memory: ImageMemory) -> ImagePlan:
    """Make an image here, and return the plan that does no more than take it."""
    flags, image.flags = image.flags, image.flags | KEEP_BGR
    out = torch.empty((1, CHANNELS, image.height, image.width), dtype=torch.uint8)
    out = out.contiguous(memory_format=torch.channels_last)
    run_on_cpu(pack([image], memory), memory, out)
    made = whole(in_pixels(out.permute(0, 2, 3, 1).numpy()[0]))
    made.flags = flags & KEEP_BGR
    return made
