"""``loss_optim``: target assignment, loss and the heads' gradients in one operator."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch_fastdet.yolov5.loss import ComputeLoss
from torch_fastdet.yolov5.switch import Switch

if TYPE_CHECKING:
    from torch_fastdet.yolov5.patches import Patches

# Segmentation has a ComputeLoss of its own, in utils.segment.loss, which stays.
STOCK_MODULES = ("utils.loss", "yolov5.utils.loss")
CONSTRUCTOR = ("self", "model", "autobalance")
CALL = ("self", "p", "targets")


def _is_stock(value: Any) -> bool:
    return isinstance(value, type) and value.__name__ == "ComputeLoss" and value.__module__ in STOCK_MODULES


class LossOptim(Switch):
    name = "loss_optim"
    help = "whole ComputeLoss of train.py and val.py in a few launches, without host synchronisation"
    modules = ("utils.loss",)

    def visit(self, module: ModuleType, patches: Patches) -> None:
        for attribute, value in list(vars(module).items()):
            if not _is_stock(value):
                continue
            constructor = tuple(inspect.signature(value.__init__).parameters)
            call = tuple(inspect.signature(value.__call__).parameters)
            if constructor == CONSTRUCTOR and call == CALL:
                patches.replace(module, attribute, ComputeLoss)
            else:
                patches.cannot_apply(
                    self,
                    f"{value.__module__}.ComputeLoss takes {constructor[1:]} and {call[1:]}, "
                    f"not {CONSTRUCTOR[1:]} and {CALL[1:]}.",
                )
