"""Makes the pictures of a plan on the CPU."""

from __future__ import annotations

import torch

from torch_fastdet import ops
from torch_fastdet.loader.memory import CHANNELS, PictureMemory
from torch_fastdet.loader.plan import KEEP_BGR, Layer, Picture, Plan, Source, pack


def run_on_cpu(plan: Plan, memory: PictureMemory, out: torch.Tensor) -> None:
    """Make the pictures of a plan in ``out``, uint8 (n, 3, height, width)."""
    own = plan.own if isinstance(plan.own, torch.Tensor) else torch.from_numpy(plan.own)
    placements, layers, matrices, pictures, blend, tables, masks = map(torch.from_numpy, plan.tables_in_order())
    warp, lanes = ops.opencv_rules()
    ops.image_augment_(
        out,
        [memory.tensor(), own],
        placements,
        layers,
        matrices,
        pictures,
        blend,
        tables,
        masks,
        warp=warp,
        hsv_lanes=lanes,
    )


def finish(picture: Picture, memory: PictureMemory) -> Picture:
    """Make a picture here, and return the plan that does no more than take it."""
    flags, picture.flags = picture.flags, picture.flags | KEEP_BGR
    out = torch.empty((1, CHANNELS, picture.height, picture.width), dtype=torch.uint8)
    out = out.contiguous(memory_format=torch.channels_last)
    run_on_cpu(pack([picture], memory), memory, out)
    pixels = out.permute(0, 2, 3, 1).numpy()[0]
    source = Source(-1, picture.height, picture.width, pixels)
    layer = Layer(picture.height, picture.width, [(source, 0, 0, 0, 0, picture.width, picture.height)])
    return Picture(picture.height, picture.width, [layer], flags=flags & KEEP_BGR)
