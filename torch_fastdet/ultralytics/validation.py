"""What Ultralytics' validators do with the detections of a batch: matched in C++, on the host, after one copy for the batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_fastdet import ops
from torch_fastdet.hosts.shapes import ConfusionMatrix, Validator
from torch_fastdet.hosts.shared import average_precision
from torch_fastdet.hosts.shared.floats import as_float

__all__ = ["average_precisions", "confuse", "confusions", "match", "update_on_host"]


def _rows(detections: dict[str, Tensor]) -> Tensor:
    """(n, 6): x1, y1, x2, y2, confidence, class."""
    return as_float(torch.cat([detections["bboxes"], detections["conf"][:, None], detections["cls"][:, None]], 1))


def _labels(batch: dict[str, Tensor]) -> Tensor:
    """(m, 5): class, x1, y1, x2, y2."""
    return torch.cat([batch["cls"].reshape(-1, 1), batch["bboxes"]], 1)


def match(stock: Callable, matching: Callable, rule: str) -> Callable:
    """``DetectionValidator._process_batch`` by one operator; a validator with a matching of its own gets stock's."""

    @functools.wraps(stock)
    def _process_batch(self: Validator, preds: dict[str, Tensor], batch: dict[str, Any]) -> dict[str, Any]:
        if type(self).match_predictions is not matching or not len(preds["cls"]) or not len(batch["cls"]):
            return stock(self, preds, batch)
        rows = _rows(preds)
        correct = ops.match_detections(rows, _labels(batch).to(rows.device), self.iouv.to(rows.device), rule=rule)
        return {"tp": correct.cpu().numpy()}

    return _process_batch


def confusions(rows: Tensor, labels: Tensor, classes: int, conf: float, iou_thres: float, rule: str) -> Tensor:
    """The confusion matrix of one image, on the host, as Ultralytics counts by either rule of matching."""
    counts = torch.zeros(classes + 1, classes + 1, dtype=torch.int64, device=rows.device)
    ops.confusion_matrix_(counts, rows, labels, None, conf, iou_thres, rule)
    counts = counts.cpu()
    if rule == "best" and not counts[:-1, :-1].any():  # the operator adds no false positives then, as YOLOv5
        found = rows[rows[:, 4] > conf, 5].long().cpu()
        counts[:-1, -1] += torch.bincount(found, minlength=classes)[:classes]
    return counts


def average_precisions(stock: Any) -> Callable[..., Any]:
    """``ap_per_class`` of ultralytics.utils.metrics from one sort; stock's own functions integrate, smooth and plot."""

    def ap_per_class(
        tp: Any,
        conf: Any,
        pred_cls: Any,
        target_cls: Any,
        plot: bool = False,
        on_plot: Any = None,
        save_dir: Path = Path(),
        names: Any = None,
        eps: float = average_precision.EPS,
        prefix: str = "",
    ) -> tuple[Any, ...]:
        arrays = average_precision.is_taken(tp, conf, pred_cls, target_cls)
        if not arrays or (plot and not len(target_cls)):
            return stock(tp, conf, pred_cls, target_cls, plot, on_plot, save_dir, names, eps, prefix)
        host = stock.__globals__
        result = average_precision.curves(tp, conf, pred_cls, target_cls, host["compute_ap"], eps)
        rows = [np.zeros_like(result.x) if row is None else row for row in result.precision_by_recall()]
        by_recall = np.array(rows) if rows else np.zeros((1, len(result.x)))
        if plot:
            shown = {i: names[c] for i, c in enumerate(result.classes) if c in names} if names else {}
            average_precision.plot(
                stock, result, by_recall, shown, lambda short: save_dir / f"{prefix}{short}_curve.png", on_plot=on_plot
            )
        numbers = (*result.at_best(host["smooth"], eps), result.ap, result.classes.astype(int))
        return *numbers, result.precision, result.recall, result.f1, result.x, by_recall

    return ap_per_class


def confuse(stock: Callable, rule: str) -> Callable:
    """``ConfusionMatrix.process_batch`` by one operator; rotated boxes and kept matches (``visualize``) get stock's."""

    @functools.wraps(stock)
    def process_batch(
        self: ConfusionMatrix,
        detections: dict[str, Tensor],
        batch: dict[str, Any],
        conf: float = 0.25,
        iou_thres: float = 0.45,
    ) -> None:
        if self.matches is not None or batch["bboxes"].shape[-1] != 4 or not isinstance(detections["cls"], Tensor):
            stock(self, detections, batch, conf, iou_thres)
            return
        rows = _rows(detections)
        # Suppression sorts; end-to-end heads do not.
        rows = rows[rows[:, 4].argsort(descending=True, stable=True)]
        self.matrix += confusions(rows, _labels(batch).to(rows.device), self.nc, conf, iou_thres, rule).numpy()

    return process_batch


def update_on_host(stock: Callable, processing: Callable) -> Callable:
    """``DetectionValidator.update_metrics`` of tensors on the host: one copy a batch instead of several syncs an image.

    A validator whose ``_process_batch`` is not ``processing`` (masks, keypoints, rotated boxes) gets stock's.
    """

    @functools.wraps(stock)
    def update_metrics(self: Validator, preds: list[dict[str, Tensor]], batch: dict[str, Any]) -> None:
        device = self.device
        if type(self)._process_batch is not processing or torch.device(device).type == "cpu" or not preds:
            stock(self, preds, batch)
            return
        if self.args.single_cls:  # as stock does, also for the plots that come later
            for pred in preds:
                pred["cls"].zero_()
        labels = {name: batch[name].cpu() for name in ("batch_idx", "cls", "bboxes")}
        self.device = torch.device("cpu")  # where stock makes what it combines with the labels
        try:
            stock(self, _to_host(preds), batch | labels)
        finally:
            self.device = device

    return update_metrics


def _to_host(preds: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The tensors of all images in one copy for each name and dtype."""
    host: list[dict[str, Tensor]] = [{} for _ in preds]
    for name in preds[0]:
        parts = torch.cat([pred[name] for pred in preds]).cpu().split([len(pred[name]) for pred in preds])
        for image, part in zip(host, parts):
            image[name] = part
    return host
