"""``loss_optim``: target assignment, loss and the heads' gradients in one operator."""

from __future__ import annotations

from typing import Any

from torch_fastdet.hosts.engine.stand_in import stand_in
from torch_fastdet.hosts.engine.switch import Name, Switch
from torch_fastdet.yolov5.loss import ComputeLoss
from torch_fastdet.yolov5.trials import loss_differs


class LossOptim(Switch):
    name = "loss_optim"
    help = "whole ComputeLoss of train.py and val.py in a few launches, without host synchronisation"
    modules = ("utils.loss",)
    # Segmentation has a ComputeLoss of its own, in utils.segment.loss, which stays.
    names = (
        Name(
            "ComputeLoss",
            ComputeLoss,
            ("utils.loss", "yolov5.utils.loss"),
            methods=(("__init__", "self", "model", "autobalance"), ("__call__", "self", "p", "targets")),
        ),
    )

    def refusal(self, name: Name, stock: Any) -> str | None:
        return super().refusal(name, stock) or loss_differs(stock)

    def drop_in(self, name: Name, stock: Any) -> Any:
        return stand_in(self.name, stock, ComputeLoss)
