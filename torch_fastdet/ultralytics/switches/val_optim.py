"""``val_optim``: detections matched with labels in C++, with one copy to the host a batch; AP from one sort."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from torch_fastdet import ops
from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.switch import class_of
from torch_fastdet.hosts.shared import average_precision
from torch_fastdet.hosts.shared.matching_case import DETECTIONS, IOUV, LABELS
from torch_fastdet.ultralytics import validation
from torch_fastdet.ultralytics.switch import UltralyticsSwitch

VALIDATOR = "ultralytics.models.yolo.detect.val"
METRICS = "ultralytics.utils.metrics"
RULES = ("greedy", "best")
IMAGES = (LABELS, LABELS[-1:], LABELS[:0])  # no detection meets the last label
# Of 8.4.120 to 8.4.180, and of 8.4.185 to 8.4.190.
KNOWN = {"ap_per_class": ("f5a9d556", "e8ab4de3"), "compute_ap": ("d0c7762c", "b5719675")}


class ValOptim(UltralyticsSwitch):
    name = "val_optim"
    help = "matching of detections and labels, and confusion matrix, in the validation of detectors"
    modules = ("models.yolo.detect.val", "utils.metrics")

    def visit(self, module: ModuleType) -> None:
        name = namespace(module).get("__name__")
        if name == VALIDATOR:
            self._replace_validator(class_of(module, "DetectionValidator"))
        elif name == METRICS:
            self._replace_matrix(class_of(module, "ConfusionMatrix"))
            average_precision.replace(self, module, KNOWN, validation.average_precisions)

    def _replace_validator(self, stock: Any) -> None:
        if stock is None or self.has_replaced(stock):
            return
        where = f"{VALIDATOR}.DetectionValidator"
        if not (
            self.takes(f"{where}.update_metrics", stock.update_metrics, ("self", "preds", "batch"))
            and self.takes(f"{where}._process_batch", stock._process_batch, ("self", "preds", "batch"))
        ):
            return
        rule = _rule(_matches, lambda: _stock_matches(stock.match_predictions))
        if rule is None:
            self.cannot_apply(f"{where}.match_predictions matches by an unknown rule.")
            return
        processing = validation.match(stock._process_batch, stock.match_predictions, rule)
        updating = validation.update_on_host(stock.update_metrics, processing)
        self.replace(stock, "_process_batch", processing)
        self.replace(stock, "update_metrics", updating)

    def _replace_matrix(self, stock: Any) -> None:
        if stock is None or self.has_replaced(stock):
            return
        where = f"{METRICS}.ConfusionMatrix.process_batch"
        if not self.takes(where, stock.process_batch, ("self", "detections", "batch", "conf", "iou_thres")):
            return
        rule = _rule(_confusions, lambda: _stock_confusions(stock))
        if rule is None:
            self.cannot_apply(f"{where} matches by an unknown rule.")
            return
        self.replace(stock, "process_batch", validation.confuse(stock.process_batch, rule))


def _rule(ours: Callable[[str], torch.Tensor], stock: Callable[[], torch.Tensor]) -> str | None:
    """The rule by which the installed version matches the case that tells rules apart."""
    with torch.device("cpu"):
        wanted = stock()
        return next((rule for rule in RULES if torch.equal(ours(rule), wanted)), None)


def _matches(rule: str) -> torch.Tensor:
    return ops.match_detections(DETECTIONS, LABELS, IOUV, rule=rule)


def _stock_matches(match_predictions: Callable) -> torch.Tensor:
    from ultralytics.utils.metrics import box_iou

    iou = box_iou(LABELS[:, 1:], DETECTIONS[:, :4])
    return match_predictions(SimpleNamespace(iouv=IOUV), DETECTIONS[:, 5], LABELS[:, 0], iou)


def _confusions(rule: str) -> torch.Tensor:
    return torch.stack([validation.confusions(DETECTIONS, labels, 2, 0.25, 0.45, rule) for labels in IMAGES])


def _stock_confusions(stock: type) -> torch.Tensor:
    found = []
    for labels in IMAGES:
        matrix = stock(names={0: "0", 1: "1"})
        matrix.process_batch(
            {"bboxes": DETECTIONS[:, :4], "conf": DETECTIONS[:, 4], "cls": DETECTIONS[:, 5]},
            {"bboxes": labels[:, 1:], "cls": labels[:, 0]},
        )
        found.append(torch.as_tensor(matrix.matrix).long())
    return torch.stack(found)
