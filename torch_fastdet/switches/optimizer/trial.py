"""Tries a moving average and an optimizer on small cases that show what they compute."""

from __future__ import annotations

import torch
from torch import nn

from torch_fastdet import optim
from torch_fastdet.patching.evidence import Behaves
from torch_fastdet.patching.protocols import Model, Stock
from torch_fastdet.switches.frameworks import REFERENCE


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.register_buffer("mean", torch.tensor([0.5]))


def _averages(kind: Stock) -> list[object]:
    found: list[object] = []
    for updates in (0, 1500):
        model: Model = _Model()
        ema = kind(model, updates=updates)
        for _ in range(2):
            model.weight.mul_(1.5)
            model.mean.add_(8.0)
            ema.update(model)
        found += [ema.ema.weight.detach(), ema.ema.mean, torch.tensor([float(ema.updates), ema.decay(2000)])]
    return found


def moving_average(drop_in: object, reference: str) -> Behaves:
    return Behaves("its moving average", lambda stock: (_averages(stock), _averages(drop_in)), 1e-6, reference)


def _moved(kind: type) -> torch.Tensor:
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


# MuSGD has the same bits on the CPU of one machine; another machine may sum bfloat16 products in another order.
MUSGD = Behaves("a step of its MuSGD", lambda stock: (_moved(stock), _moved(optim.MuSGD)), 1e-3, REFERENCE)
