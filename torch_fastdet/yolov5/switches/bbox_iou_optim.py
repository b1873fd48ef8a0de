"""``bbox_iou_optim``: the IoU of the box loss in one kernel, and its gradient in another."""

from __future__ import annotations

import inspect
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch_fastdet.yolov5.dropins import bbox_iou
from torch_fastdet.yolov5.switch import Switch

if TYPE_CHECKING:
    from torch_fastdet.yolov5.patches import Patches

# v7.0 and the PyPI package define it themselves; YOLOv5's head takes it from ultralytics.
STOCK_MODULES = ("utils.metrics", "yolov5.utils.metrics", "ultralytics.utils.metrics")
PARAMETERS = tuple(inspect.signature(bbox_iou).parameters)


def _is_stock(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__name__ == "bbox_iou" and value.__module__ in STOCK_MODULES


class BboxIouOptim(Switch):
    name = "bbox_iou_optim"
    help = "fused bbox_iou in the loss of train.py and segment/train.py"
    modules = ("utils.metrics", "utils.loss", "utils.segment.loss")

    def visit(self, module: ModuleType, patches: Patches) -> None:
        for attribute, value in list(vars(module).items()):
            if not _is_stock(value):
                continue
            parameters = tuple(inspect.signature(value).parameters)
            if parameters == PARAMETERS:
                patches.replace(module, attribute, bbox_iou)
            else:
                patches.cannot_apply(
                    self,
                    f"{value.__module__}.{value.__name__} takes ({', '.join(parameters)}), not ({', '.join(PARAMETERS)}).",
                )
