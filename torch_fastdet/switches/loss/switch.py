"""``loss_optim``: whole losses in a few launches."""

from __future__ import annotations

from typing import Literal

from torch_fastdet.patching.evidence import (
    Asks,
    Signature,
)
from torch_fastdet.patching.stand_in import stand_in
from torch_fastdet.patching.switch import Switch, Target
from torch_fastdet.switches.frameworks import VERSION, yolov5
from torch_fastdet.switches.loss.trial import TRIALS, differs
from torch_fastdet.switches.loss.ultralytics import STOCK_MODULE, _subclass
from torch_fastdet.switches.loss.yolov5 import ComputeLoss, SegmentationLoss
from torch_fastdet.switches.loss.yolov5_trial import LOSS, SEGMENTATION_LOSS

YOLOV5 = Switch(
    "loss_optim",
    "whole ComputeLoss of train.py, val.py and their segment/ forms in a few launches, without host synchronisation",
    (
        Target(
            yolov5("utils.loss"),
            "ComputeLoss",
            make=lambda active, stock, _: stand_in(active.name, stock, ComputeLoss),
            evidence=(
                Signature(("self", "model", "autobalance"), "__init__"),
                Signature(("self", "p", "targets"), "__call__"),
                LOSS,
            ),
            missing="refuse",
        ),
        Target(
            yolov5("utils.segment.loss"),
            "ComputeLoss",
            make=lambda active, stock, _: stand_in(active.name, stock, SegmentationLoss),
            evidence=(
                Signature(("self", "model", "autobalance", "overlap"), "__init__"),
                Signature(("self", "preds", "targets", "masks"), "__call__"),
                SEGMENTATION_LOSS,
            ),
            otherwise="say",  # without it, detection's goes on
        ),
    ),
    modules=("utils.loss", "utils.segment.loss"),
)


def criterion(name: str, *evidence: Signature | Asks, otherwise: Literal["refuse", "say"] = "refuse") -> Target:
    """A row of ``loss_optim``. To add a criterion: a subclass for it in ``loss.py``, its name there in ``_subclass``, the methods of
    stock's that ours stands for here, with their parameters, and a small batch in ``trial.py`` that tells stock's loss from
    another one.
    """
    return Target(
        (STOCK_MODULE,), name, make=lambda _, stock, __: _subclass(stock), evidence=evidence, otherwise=otherwise
    )


ULTRALYTICS = Switch(
    "loss_optim",
    "whole v8DetectionLoss, v8SegmentationLoss, SegmentLoss26, v8PoseLoss, PoseLoss26, v8OBBLoss and E2ELoss of training and validation in a few launches, "
    "without host synchronisation",
    (
        *(
            criterion(
                name,
                Signature(("self", "model", "tal_topk", "tal_topk2"), "__init__"),
                Signature(("self", "preds", "batch"), "__call__"),
                Signature(("self", "preds", "batch"), "loss"),
                Signature(("self", "preds"), "parse_output"),
                Asks("the loss of a small batch", differs),
                # A version with another loss of one task keeps that one alone.
                otherwise="refuse" if name == "v8DetectionLoss" else "say",
            )
            for name in TRIALS
        ),
        criterion(
            "E2ELoss",
            Signature(("self", "model", "loss_fn"), "__init__"),
            Signature(("self", "preds", "batch"), "__call__"),
            Signature(("self",), "update"),
        ),
    ),
    modules=("utils.loss", "nn.tasks"),
    evidence=(VERSION,),
)
