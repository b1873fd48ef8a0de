"""Declares ``upsample_optim``: nearest neighbour upsampling by two, which keeps the dtype under autocast.

The method that ``torch.nn.Upsample`` modules share is replaced, not the modules, so checkpoints hold nothing of torch_fastdet. Traced and exported
models, torch.func and forward-mode AD get the original operator.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from torch_fastdet import ops
from torch_fastdet._torch.private import is_recorded, is_transforming
from torch_fastdet.patching.switch import Outside, Switch


def doubles(module: torch.nn.Upsample, input: torch.Tensor) -> bool:
    return (
        isinstance(input, torch.Tensor)  # torch.fx's proxies have no size
        and module.mode == "nearest"
        and module.size is None
        and module.scale_factor in (2.0, (2.0, 2.0))
        and input.dim() == 4
        and input.is_floating_point()
        and input.device.type in ("cpu", "cuda")
    )


def upsample_forward(self: torch.nn.Upsample, input: torch.Tensor) -> torch.Tensor:
    """Run ``torch.nn.Upsample.forward`` with our kernel for nearest upsampling by two, and torch's for everything else."""
    # There are two ifs because torch.jit.script omits the block of the first one, but compiles the whole of an `and`.
    if not torch.jit.is_scripting():  # noqa: SIM102
        if doubles(self, input) and not is_recorded() and not is_transforming():
            # torch.func and forward-mode AD support the original operator, while torch_fastdet's has only a backward.
            return ops.upsample_nearest2x(input)
    return F.interpolate(
        input,
        self.size,
        self.scale_factor,
        self.mode,
        self.align_corners,
        recompute_scale_factor=self.recompute_scale_factor,
    )


YOLOV5 = Switch(
    "upsample_optim",
    "nearest 2x upsampling in the neck by a bandwidth-bound kernel",
    (Outside(torch.nn.Upsample, "forward", upsample_forward),),
    needs_host=False,
)
ULTRALYTICS = dataclasses.replace(YOLOV5, needs_host=True)
