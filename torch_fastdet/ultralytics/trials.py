"""Small cases by which a version of Ultralytics shows that its code computes something else than ours.

Some constants of Ultralytics are no parameters. So stock's code runs on made-up numbers when a switch is about to replace it. No
random numbers are drawn: a training's own stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_fastdet import optim
from torch_fastdet.patching.formula import plainly_on_the_cpu
from torch_fastdet.ultralytics.dropins import ModelEMA, bbox_iou

REFERENCE = "8.4.190"


def _difference(what: str, results: Callable[[], tuple[torch.Tensor, torch.Tensor]], tolerance: float) -> str | None:
    """One line if stock's numbers, the first of ``results()``, are not ours."""
    try:
        with plainly_on_the_cpu():
            theirs, ours = results()
            if theirs.shape != ours.shape:
                return f"{what} has {theirs.numel()} numbers, and not {ours.numel()} as in {REFERENCE}."
            far = ~torch.isclose(theirs, ours, rtol=tolerance, atol=tolerance)
    except Exception as error:  # whatever its code does
        return f"{what} cannot be compared with ours: {type(error).__name__}: {error}"
    if not far.any():
        return None
    return f"{what} of a small case gives {float(theirs[far][0]):g}, and not {float(ours[far][0]):g} as in {REFERENCE}."


def ema_differs(stock: Any) -> str | None:
    """One line if ``stock``, a ModelEMA, moves another way than ours, at the beginning or late in its ramp."""

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

    return _difference("its moving average", lambda: (averages(stock), averages(ModelEMA)), 1e-6)


def musgd_differs(stock: Any) -> str | None:
    """One line if ``stock``, a MuSGD, steps another way than ours."""

    def moved(kind: Any) -> torch.Tensor:
        matrix = nn.Parameter(torch.linspace(-1, 1, 36).sin().view(4, 3, 3, 1))
        bias = nn.Parameter(torch.linspace(0, 1, 5))
        common = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
        groups = [
            {"params": [matrix], "use_muon": True, "weight_decay": 0.01, **common},
            {"params": [bias], "use_muon": False, **common},
        ]
        optimizer = kind(groups, muon=0.2, sgd=1.0)
        for step in range(2):
            matrix.grad = torch.linspace(0, 3 + step, 36).cos().view(4, 3, 3, 1)
            bias.grad = torch.linspace(-1, 1 + step, 5)
            optimizer.step()
        return torch.cat([matrix.detach().flatten(), bias.detach()])

    # Ours has stock's bits on the CPU; another machine may sum bfloat16 products in another order.
    return _difference("a step of its MuSGD", lambda: (moved(stock), moved(optim.MuSGD)), 1e-3)


def bbox_iou_differs(stock: Any) -> str | None:
    """One line if ``stock``, a bbox_iou, gives other numbers than ours, of any kind."""

    def values(function: Any) -> torch.Tensor:
        boxes = torch.tensor([[30.0, 20.0, 12.0, 9.0], [33.0, 22.0, 5.0, 16.0], [70.0, 60.0, 8.0, 8.0]])
        kinds: tuple[dict[str, Any], ...] = ({}, {"GIoU": True}, {"DIoU": True}, {"CIoU": True})
        return torch.cat([function(boxes[:2], boxes[1:], xywh=True, **kind) for kind in kinds])

    return _difference("its bbox_iou", lambda: (values(stock), values(bbox_iou)), 1e-5)
