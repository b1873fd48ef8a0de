"""Small cases in which a version of Ultralytics shows what it computes.

Some constants of Ultralytics are not parameters. So stock's code runs on made-up numbers when a switch is about to replace it. No
random numbers are drawn: a training's own stay what they were.
"""

from __future__ import annotations

import torch
from torch import nn

from torch_fastdet import optim
from torch_fastdet.patching.evidence import Behaves
from torch_fastdet.switches import cases
from torch_fastdet.ultralytics.dropins import ModelEMA, bbox_iou

REFERENCE = "8.4.190"


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


AVERAGE = cases.moving_average(ModelEMA, REFERENCE)
IOU = cases.iou(bbox_iou, REFERENCE)
# Ours has stock's bits on the CPU; another machine may sum bfloat16 products in another order.
MUSGD = Behaves("a step of its MuSGD", lambda stock: (_moved(stock), _moved(optim.MuSGD)), 1e-3, REFERENCE)
