"""``loss_optim``: v8DetectionLoss and E2ELoss in a few launches, without host synchronisation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torch_fastdet.patching.switch import Name
from torch_fastdet.ultralytics.loss import STOCK_MODULE, _subclass
from torch_fastdet.ultralytics.switch import UltralyticsSwitch

# Ultralytics' constants are no parameters: a version that has others gives another loss here.
GAINS = {"box": 7.5, "cls": 0.5, "dfl": 1.5}
TOLERANCE = 1e-4


class LossOptim(UltralyticsSwitch):
    name = "loss_optim"
    help = (
        "whole v8DetectionLoss and E2ELoss of training and validation in a few launches, without host synchronisation"
    )
    oldest = "8.4.170"  # before it, small boxes were assigned in another way
    modules = ("utils.loss", "nn.tasks")
    names = (
        Name(
            "v8DetectionLoss",
            None,
            (STOCK_MODULE,),
            methods=(
                ("__init__", "self", "model", "tal_topk", "tal_topk2"),
                ("__call__", "self", "preds", "batch"),
                ("loss", "self", "preds", "batch"),
                ("parse_output", "self", "preds"),
            ),
        ),
        Name(
            "E2ELoss",
            None,
            (STOCK_MODULE,),
            methods=(
                ("__init__", "self", "model", "loss_fn"),
                ("__call__", "self", "preds", "batch"),
                ("update", "self"),
            ),
        ),
    )

    def refusal(self, name: Name, stock: Any) -> str | None:
        reason = name.difference(stock)
        if reason is None and name.attribute == "v8DetectionLoss":
            reason = differs(stock)
        return reason

    def drop_in(self, name: Name, stock: Any) -> Any:
        return _subclass(stock)


class _Model(nn.Module):
    """As much of a model as a criterion asks for."""

    def __init__(self, reg_max: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.args = SimpleNamespace(**GAINS, epochs=1)
        self.__dict__["model"] = [SimpleNamespace(stride=torch.tensor([8.0, 16.0]), nc=classes, reg_max=reg_max)]


def differs(stock: Any) -> str | None:
    """One sentence if stock's loss of a small made-up batch is not ours: boxes of all sizes, both kinds of distances, topk2."""
    classes, sizes = 3, ((8, 10), (4, 5))
    anchors = sum(ny * nx for ny, nx in sizes)
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad(), torch.inference_mode(False):
            rows = torch.rand(12, 6, generator=generator)
            batch = {
                "batch_idx": torch.arange(12) // 6,
                "cls": (rows[:, 1] * classes).floor(),
                "bboxes": rows[:, 2:] ** 2,
            }
            for reg_max, topk, topk2 in ((16, 10, None), (1, 7, 1)):
                preds = {
                    "boxes": torch.rand(2, 4 * reg_max, anchors, generator=generator) * 4,
                    "scores": torch.randn(2, classes, anchors, generator=generator),
                    "feats": [torch.zeros(2, 1, ny, nx) for ny, nx in sizes],
                }
                criteria = [kind(_Model(reg_max, classes), topk, topk2) for kind in (stock, _subclass(stock))]
                (theirs, their_items), (ours, our_items) = [criterion(dict(preds), batch) for criterion in criteria]
                same = torch.allclose(theirs, ours, TOLERANCE, TOLERANCE) and list(their_items) == list(our_items)
                if not same:
                    return f"its loss of a small batch is {theirs.tolist()}, and not {ours.tolist()} as in 8.4.190."
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        return f"its loss cannot be compared with ours: {type(error).__name__}: {error}"
    return None
