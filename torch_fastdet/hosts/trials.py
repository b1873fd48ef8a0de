"""Small cases by which a host shows that its code computes something else than ours, as a fork's or another version's may.

No random numbers are drawn: a training's own stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_fastdet.hosts.formula import plainly_on_the_cpu


def difference(
    what: str, results: Callable[[], tuple[torch.Tensor, torch.Tensor]], tolerance: float, reference: str
) -> str | None:
    """One line if stock's numbers, the first of ``results()``, are not ours, which are those of ``reference``."""
    try:
        with plainly_on_the_cpu():
            theirs, ours = results()
            if theirs.shape != ours.shape:
                return f"{what} has {theirs.numel()} numbers, and not {ours.numel()} as in {reference}."
            far = ~torch.isclose(theirs, ours, rtol=tolerance, atol=tolerance)
    except Exception as error:  # whatever its code does
        return f"{what} cannot be compared with ours: {type(error).__name__}: {error}"
    if not far.any():
        return None
    return f"{what} of a small case gives {float(theirs[far][0]):g}, and not {float(ours[far][0]):g} as in {reference}."


def average_differs(stock: Any, drop_in: Any, reference: str) -> str | None:
    """One line if ``stock``, a ModelEMA, moves another way than ``drop_in``, at the beginning or late in its ramp."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
            self.register_buffer("mean", torch.tensor([0.5]))

    def averages(kind: Any) -> torch.Tensor:
        found = []
        for updates in (0, 1500):
            model: Any = Model()
            ema = kind(model, updates=updates)
            for _ in range(2):
                model.weight.mul_(1.5)
                model.mean.add_(8.0)
                ema.update(model)
            found += [ema.ema.weight.detach(), ema.ema.mean, torch.tensor([float(ema.updates), ema.decay(2000)])]
        return torch.cat(found)

    return difference("its moving average", lambda: (averages(stock), averages(drop_in)), 1e-6, reference)


def iou_differs(stock: Any, drop_in: Any, reference: str) -> str | None:
    """One line if ``stock``, a bbox_iou, gives other numbers than ``drop_in``, of any kind."""

    def values(function: Any) -> torch.Tensor:
        boxes = torch.tensor([[30.0, 20.0, 12.0, 9.0], [33.0, 22.0, 5.0, 16.0], [70.0, 60.0, 8.0, 8.0]])
        kinds: tuple[dict[str, Any], ...] = ({}, {"GIoU": True}, {"DIoU": True}, {"CIoU": True})
        return torch.cat([function(boxes[:2], boxes[1:], xywh=True, **kind) for kind in kinds])

    return difference("its bbox_iou", lambda: (values(stock), values(drop_in)), 1e-5, reference)
