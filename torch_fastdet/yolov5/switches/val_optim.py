"""``val_optim``: detections matched with labels and counted in the confusion matrix on the device, one launch each; AP from one sort."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.stand_in import stand_in
from torch_fastdet.hosts.engine.switch import Name, Switch
from torch_fastdet.hosts.shared import average_precision
from torch_fastdet.hosts.shared.matching_case import DETECTIONS, IOUV, LABELS
from torch_fastdet.yolov5 import validation

METRICS = ("utils.metrics", "yolov5.utils.metrics")
# Of YOLOv5 7.0, and of GitHub's head.
KNOWN = {"ap_per_class": ("bd7f097d",), "compute_ap": ("66e3cf6e", "33760776")}


class ValOptim(Switch):
    name = "val_optim"
    help = "matching of detections and labels, and confusion matrix, in val.py and the validation inside train.py"
    modules = ("utils.metrics", "utils.general", "val")
    names = (
        Name("process_batch", validation.process_batch, ("val", "yolov5.val")),
        Name("scale_boxes", validation.scale_boxes, ("utils.general", "yolov5.utils.general")),
        Name(
            "ConfusionMatrix",
            None,
            METRICS,
            methods=(
                ("__init__", "self", "nc", "conf", "iou_thres"),
                ("process_batch", "self", "detections", "labels"),
            ),
        ),
    )

    def refusal(self, name: Name, stock: Any) -> str | None:
        found = name.difference(stock)
        if found is not None or name.attribute == "scale_boxes":
            return found
        ours = validation.process_batch if name.attribute == "process_batch" else self._class(stock)
        with torch.device("cpu"):
            same = torch.equal(_result(stock), _result(ours))
        return None if same else f"{stock.__module__}.{stock.__name__} matches by another rule than YOLOv5 v7.0."

    def visit(self, module: ModuleType) -> None:
        if namespace(module).get("__name__") in METRICS:
            average_precision.replace(self, module, KNOWN, validation.average_precisions)

    def drop_in(self, name: Name, stock: Any) -> Any:
        if name.attribute != "ConfusionMatrix":
            return name.drop_in
        return stand_in(self.name, stock, self._class(stock))

    def _class(self, stock: type) -> type:
        return validation.confusion_matrix_class(stock, lambda: self._look_at_script(stock))

    def _look_at_script(self, stock: type) -> None:
        """val.py as the script that runs: it defines process_batch itself, after its imports and before its first image."""
        main = sys.modules.get("__main__")
        script, metrics = (
            namespace(module).get("__file__") for module in (main, sys.modules[stock.__module__]) if module
        )
        if main is None or not isinstance(script, str) or not isinstance(metrics, str):
            return
        if Path(script).name == "val.py" and Path(script).resolve().parent == Path(metrics).resolve().parents[1]:
            self._look_for(self.names[0], "__main__", [main])


def _result(matcher: Any) -> torch.Tensor:
    """What a process_batch, or a class of confusion matrices, gives for the case that tells rules apart."""
    if not isinstance(matcher, type):
        return torch.as_tensor(matcher(DETECTIONS.clone(), LABELS.clone(), IOUV.clone())).bool()
    matrix = matcher(2)
    matrix.process_batch(DETECTIONS.clone(), LABELS.clone())
    return torch.as_tensor(matrix.matrix).long()
