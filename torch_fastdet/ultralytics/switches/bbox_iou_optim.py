"""``bbox_iou_optim``: the IoU of the box loss and of target assignment in one kernel, and its gradient in another."""

from __future__ import annotations

from typing import Any

from torch_fastdet.hosts.engine.switch import Name
from torch_fastdet.ultralytics.dropins import bbox_iou
from torch_fastdet.ultralytics.switch import UltralyticsSwitch
from torch_fastdet.ultralytics.trials import bbox_iou_differs


class BboxIouOptim(UltralyticsSwitch):
    name = "bbox_iou_optim"
    help = "fused bbox_iou in the losses and in target assignment"
    modules = ("utils.metrics", "utils.loss", "utils.tal")
    names = (Name("bbox_iou", bbox_iou, ("ultralytics.utils.metrics",)),)

    def refusal(self, name: Name, stock: Any) -> str | None:
        return super().refusal(name, stock) or bbox_iou_differs(stock)
