"""Declares ``loss_optim``: whole losses in a few launches."""

from __future__ import annotations

import inspect
from types import ModuleType

from torch_fastdet.patching.evidence import Follows, Signature
from torch_fastdet.patching.protocols import Stock
from torch_fastdet.patching.replace import describe
from torch_fastdet.patching.switch import Active, Switch, Target
from torch_fastdet.switches.frameworks import yolov5
from torch_fastdet.switches.loss import rtdetr
from torch_fastdet.switches.loss.trial import CRITERION, END_TO_END, RTDETR_CRITERION, TRIALS
from torch_fastdet.switches.loss.ultralytics import STOCK_MODULE, drop_in
from torch_fastdet.switches.loss.yolov5 import ComputeLoss, SegmentationLoss
from torch_fastdet.switches.loss.yolov5_trial import in_place, trial_of

YOLOV5 = Switch(
    "loss_optim",
    "whole ComputeLoss of train.py, val.py and their segment/ forms in a few launches, without host synchronisation",
    (
        Target(
            yolov5("utils.loss"),
            "ComputeLoss",
            make=lambda active, stock, _: in_place(active, stock, ComputeLoss),
            evidence=(
                Signature(("self", "model", "autobalance"), "__init__"),
                Signature(("self", "p", "targets"), "__call__"),
                trial_of(ComputeLoss),
            ),
        ),
        Target(
            yolov5("utils.segment.loss"),
            "ComputeLoss",
            make=lambda active, stock, _: in_place(active, stock, SegmentationLoss),
            evidence=(
                Signature(("self", "model", "autobalance", "overlap"), "__init__"),
                Signature(("self", "preds", "targets", "masks"), "__call__"),
                trial_of(SegmentationLoss),
            ),
            otherwise="say",  # without it, detection's goes on
        ),
    ),
    modules=("utils.loss",),
)


INIT = Signature(("self", "model", "tal_topk", "tal_topk2"), "__init__")
METHODS = (
    Signature(("self", "preds", "batch"), "__call__"),
    Signature(("self", "preds", "batch"), "loss"),
    Signature(("self", "preds"), "parse_output"),
)


def _end_to_end(active: Active, stock: Stock, _: ModuleType) -> object:
    branch = describe(inspect.signature(stock).parameters["loss_fn"].default)
    if any(outcome.name == branch and outcome.obstacle is None for outcome in active.outcomes.values()):
        return drop_in(stock)
    return Follows(f"its branches are {branch}, which stays.")


ULTRALYTICS = Switch(
    "loss_optim",
    "whole v8DetectionLoss, v8SegmentationLoss, SegmentLoss26, v8PoseLoss, PoseLoss26, v8OBBLoss, E2ELoss and RTDETRDetectionLoss of training and validation in a few launches, "
    "without host synchronisation",
    (
        # To add a criterion, add its class to ``ultralytics.py`` and a row to ``TRIALS`` of ``trial.py``.
        *(
            Target(
                (STOCK_MODULE,),
                name,
                make=lambda _, stock, __: drop_in(stock),
                evidence=(INIT, *METHODS, CRITERION),
                # If a version changes the loss of one task, only that task keeps the original.
                otherwise="refuse" if name == "v8DetectionLoss" else "say",
            )
            for name in TRIALS
        ),
        Target(
            (STOCK_MODULE,),
            "E2ELoss",
            make=_end_to_end,
            evidence=(
                Signature(("self", "model", "loss_fn"), "__init__"),
                Signature(("self", "preds", "batch"), "__call__"),
                Signature(("self",), "update"),
                END_TO_END,
            ),
            otherwise="say",
        ),
        Target(
            (rtdetr.STOCK_MODULE,),
            "RTDETRDetectionLoss",
            make=lambda _, stock, __: drop_in(stock),
            evidence=(
                Signature(("self", "preds", "batch", "dn_bboxes", "dn_scores", "dn_meta"), "forward"),
                RTDETR_CRITERION,
            ),
            otherwise="say",
        ),
    ),
    modules=("utils.loss", "nn.tasks"),
)
