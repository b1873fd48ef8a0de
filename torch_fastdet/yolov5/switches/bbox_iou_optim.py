"""``bbox_iou_optim``: the IoU of the box loss in one kernel, and its gradient in another."""

from __future__ import annotations

from typing import Any

from torch_fastdet.hosts.engine.switch import Name, Switch
from torch_fastdet.yolov5.dropins import bbox_iou
from torch_fastdet.yolov5.trials import bbox_iou_differs


class BboxIouOptim(Switch):
    name = "bbox_iou_optim"
    help = "fused bbox_iou in the loss of train.py and segment/train.py"
    modules = ("utils.metrics", "utils.loss", "utils.segment.loss")
    # v7.0 and the PyPI package define it themselves; YOLOv5's head takes it from ultralytics.
    names = (Name("bbox_iou", bbox_iou, ("utils.metrics", "yolov5.utils.metrics", "ultralytics.utils.metrics")),)

    def refusal(self, name: Name, stock: Any) -> str | None:
        return super().refusal(name, stock) or bbox_iou_differs(stock)
