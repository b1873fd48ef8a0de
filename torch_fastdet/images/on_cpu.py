"""Makes the images of a plan on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from torch_fastdet import ops
from torch_fastdet.images.image_memory import CHANNELS, ImageMemory
from torch_fastdet.images.plan import KEEP_BGR, ImagePlan, Plan, in_pixels, pack, whole


def run_on_cpu(plan: Plan, memory: ImageMemory, out: torch.Tensor) -> None:
    """Make the images of a plan in ``out``, uint8 (n, 3, height, width)."""
    own = plan.own if isinstance(plan.own, torch.Tensor) else torch.from_numpy(plan.own)
    warp, lanes = ops.opencv_rules()
    arrays = plan.tables_with(plan.placements)
    tables: dict[str, Any] = {name: torch.from_numpy(table) for name, table in arrays.items()}
    ops.image_augment_(out, [memory.tensor(), own], **tables, warp=warp, hsv_lanes=lanes)


def finish(image: ImagePlan, memory: ImageMemory) -> ImagePlan:
    """Make an image here, and return the plan that does no more than take it."""
    flags, image.flags = image.flags, image.flags | KEEP_BGR
    out = torch.empty((1, CHANNELS, image.height, image.width), dtype=torch.uint8)
    out = out.contiguous(memory_format=torch.channels_last)
    run_on_cpu(pack([image], memory), memory, out)
    made = whole(in_pixels(out.permute(0, 2, 3, 1).numpy()[0]))
    made.flags = flags & KEEP_BGR
    return made
