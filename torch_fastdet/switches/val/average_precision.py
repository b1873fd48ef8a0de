"""Computes a bitwise-identical ``ap_per_class`` that sorts once by (class, confidence) instead of searching per class.

Between two true positives recall stays and precision falls. So ``compute_ap`` of the framework needs only the true positives, the
detection before each and the last one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from torch_fastdet.patching.evidence import SameCode
from torch_fastdet.patching.protocols import Function, Stock
from torch_fastdet.patching.switch import Target


@dataclass(frozen=True)
class Curves:
    """Hold precision and recall of each class that has labels.

    Args:
        classes: (c,) the classes, ascending.
        labels: (c,) how many labels each has.
        x: (1000,) confidences at which ``precision``, ``recall`` and ``f1`` stand, (c, 1000) each, at the first IoU threshold.
        ap: (c, t) average precision at each IoU threshold.
        envelopes: recall and precision from which ``ap`` at the first threshold is made; None for a class without detections.
    """

    classes: np.ndarray
    labels: np.ndarray
    x: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    ap: np.ndarray
    envelopes: list[tuple[np.ndarray, np.ndarray] | None]

    def at_best(self, smooth: Function, eps: float) -> tuple[np.ndarray, ...]:
        """Return true and false positives, precision, recall and F1 of each class where the classes' mean F1 is highest."""
        at = smooth(self.f1.mean(0), 0.1).argmax() if len(self.classes) else 0
        precision, recall, f1 = (curve[:, at] for curve in (self.precision, self.recall, self.f1))
        # Recall is the share of the labels that were found, and precision the share of the detections that found one.
        found = np.round(self.labels * recall)
        detections = found / (precision + eps)
        return found, np.round(detections - found), precision, recall, f1

    def precision_by_recall(self) -> list[np.ndarray | None]:
        """Return (1000,) precision at the recalls ``x`` for each class."""
        return [None if envelope is None else np.interp(self.x, *envelope) for envelope in self.envelopes]


def _by_class(conf: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return indices by class, and within a class by falling confidence; ties in the frameworks' order."""
    order = np.argsort(-conf)
    classes = classes[order]
    with np.errstate(invalid="ignore"):
        short = classes.astype(np.uint16)  # numpy sorts 16 bits by counting
    return order[np.argsort(short if np.array_equal(short, classes) else classes, kind="stable")]


def curves(
    tp: np.ndarray, conf: np.ndarray, pred_cls: np.ndarray, target_cls: np.ndarray, compute_ap: Function, eps: float
) -> Curves:
    """Return the curves of detections and labels, as both frameworks define them.

    ``tp`` is (n, t) bool, whether a detection is correct at each IoU threshold; ``target_cls`` are the labels' classes; ``compute_ap`` is the
    framework's function of recall and precision; ``eps`` is added to divisors.
    """
    classes, labels = np.unique(target_cls, return_counts=True)
    x = np.linspace(0, 1, 1000)
    ap = np.zeros((len(classes), tp.shape[1]))
    precision, recall = np.zeros((2, len(classes), len(x)))
    envelopes: list[tuple[np.ndarray, np.ndarray] | None] = []
    order = _by_class(conf, pred_cls)
    tp, falling, pred_cls = tp[order], -conf[order], pred_cls[order]
    starts: Any = np.searchsorted(pred_cls, classes, side="left")
    stops: Any = np.searchsorted(pred_cls, classes, side="right")
    for i, (first, last, wanted) in enumerate(zip(starts, stops, labels)):
        envelopes.append(None)
        if first == last:
            continue
        rows = tp[first:last]
        found = rows[:, 0].cumsum()
        recall[i] = np.interp(-x, falling[first:last], found / (wanted + eps), left=0)
        precision[i] = np.interp(-x, falling[first:last], found / np.arange(1, len(rows) + 1), left=1)
        for threshold in range(tp.shape[1]):
            hits = np.flatnonzero(rows[:, threshold])
            turns = np.unique(np.concatenate((hits, hits[hits > 0] - 1, [len(rows) - 1])))
            found = np.searchsorted(hits, turns, side="right")
            ap[i, threshold], envelope, steps = compute_ap(found / (wanted + eps), found / (turns + 1))
            if threshold == 0:
                envelopes[i] = steps, envelope
    f1 = 2 * precision * recall / (precision + recall + eps)
    return Curves(classes, labels, x, precision, recall, f1, ap, envelopes)


def from_one_sort(stock: Stock, rest: Callable[[Any, Any, Curves], tuple[object, ...]]) -> Function:
    """Return ``ap_per_class`` by :func:`curves`; the original's own functions integrate and smooth.

    ``rest`` returns what the framework returns behind the numbers, from the original, its arguments as attributes, and the curves; it plots, too.
    """
    signature, host = inspect.signature(stock), stock.__globals__

    def ap_per_class(*args: Any, **kwargs: Any) -> object:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = SimpleNamespace(**bound.arguments)
        arrays = given.tp, given.conf, given.pred_cls, given.target_cls
        usual = all(isinstance(array, np.ndarray) for array in arrays) and given.tp.dtype == bool and given.tp.ndim == 2
        if not usual or (given.plot and not len(given.target_cls)):
            return stock(*args, **kwargs)
        result = curves(*arrays, host["compute_ap"], given.eps)
        numbers = *result.at_best(host["smooth"], given.eps), result.ap, result.classes.astype(int)
        return *numbers, *rest(stock, given, result)

    return ap_per_class


def plot(stock: Stock, given: Any, result: Curves, by_recall: object, names: object, **options: object) -> None:
    """Draw the four plots by the original functions; ``given`` are the arguments of ``ap_per_class``."""
    host, folder = stock.__globals__, Path(given.save_dir)
    host["plot_pr_curve"](result.x, by_recall, result.ap, folder / f"{given.prefix}PR_curve.png", names, **options)
    for values, short, title in (
        (result.f1, "F1", "F1"),
        (result.precision, "P", "Precision"),
        (result.recall, "R", "Recall"),
    ):
        file = folder / f"{given.prefix}{short}_curve.png"
        host["plot_mc_curve"](result.x, values, file, names, ylabel=title, **options)


def target(where: tuple[str, ...], known: SameCode, rest: Callable[[Any, Any, Curves], tuple[object, ...]]) -> Target:
    """Return the host's ``ap_per_class``, defined in one of the modules ``where``, :func:`from_one_sort`; unknown code stays."""
    return Target(
        where, "ap_per_class", make=lambda _, f, __: from_one_sort(f, rest), evidence=(known,), otherwise="say"
    )
