"""Provides modules and forward methods of a detector's layers over :mod:`torch_fastdet.ops`."""

from __future__ import annotations

import torch

from torch_fastdet.ops import upsample_nearest2x

__all__ = ["Upsample2x"]

torch.fx.wrap("upsample_nearest2x")  # one node of a symbolic trace, as nn.Upsample is


class Upsample2x(torch.nn.Module):
    """Upsample (N, C, H, W) to (N, C, 2H, 2W), each value four times, as ``torch.nn.Upsample(None, 2, "nearest")`` does.

    Takes what :func:`torch_fastdet.ops.upsample_nearest2x` takes and keeps the memory format of its input. It has no
    parameters and no state, so it can replace an ``nn.Upsample`` in a model whose ``state_dict`` is already saved. It
    works in TorchScript, ``torch.compile(fullgraph=True)``, ``torch.export`` and ``torch.fx``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return upsample_nearest2x(input)
